"""The ways to sample the cohort of a round.

| name | the cohort of a round |
|---|---|
| ``uniform`` | exactly m clients, all subsets equally likely (the paper's) |
| ``bernoulli`` | each client by its own coin, m on average, at least one |
| ``poisson`` | each client by its own coin, m on average, perhaps none: what differential privacy counts on |
| ``cyclic`` | exactly m of the group whose turn it is |
| ``markov`` | m of the clients that happen to be present |
| ``weighted`` | exactly m, large clients more often |
| ``fixed`` | a schedule given from Python, for tests |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feddpc.checks import check_int, check_probability
from feddpc.errors import BadInputError
from feddpc.participants import ClientPool, Ids, Invite, Sampler, subset, uniform
from feddpc.registry import Registry
from feddpc.rng import generator


def names() -> list[str]:
    """Return the names a configuration may choose from; ``fixed`` is for Python only."""
    return [name for name in SAMPLERS.names() if name != "fixed"]


def options(name: str) -> dict[str, object]:
    """Return the options of a sampler with their defaults.

    >>> options("cyclic")
    {'groups': 4}
    """
    return SAMPLERS.options(name)


def make(
    name: str,
    *,
    population: int,
    cohort: int,
    seed: int,
    dropout: float = 0.0,
    sizes: npt.ArrayLike | None = None,
    **options: object,
) -> Sampler:
    """Return the sampler ``name`` that invites ``cohort`` of ``population`` clients each round.

    Args:
        name: one of `names()`, or ``fixed``.
        population: number of clients.
        cohort: number of clients invited to a round.
        seed: equal seeds give equal participants.
        dropout: probability that an invited client never answers, each on its own, in [0, 1).
        sizes: samples of each client; only ``weighted`` needs them.
        options: those of the sampler, see `options`.

    >>> make("uniform", population=5, cohort=5, seed=0).draw(1).invited.tolist()
    [0, 1, 2, 3, 4]
    """
    scheme = SAMPLERS.builder(name, options)
    check_int("population", population, 1)
    if check_int("cohort", cohort, 1) > population:
        raise BadInputError(f"cohort = {cohort} of population = {population}: take a cohort of at most {population}")
    pool = ClientPool(int(population), int(cohort), seed, sizes)
    invite = scheme(pool, **options)
    if not callable(invite):
        raise BadInputError(
            f"sampler {name!r} returns {type(invite).__name__}: it must return a function of the round, which returns "
            "the invited clients"
        )
    return Sampler(pool, check_probability("dropout", dropout, one=False), invite)


def _bernoulli(pool: ClientPool) -> Invite:
    """An independent coin per client, thrown again while no client would come: probability below 1/e, since m >= 1."""

    def invite(round: int) -> Ids:
        rng = pool.rng(round)
        count = 0
        while count == 0:
            count = _heads(pool, rng)
        return subset(rng, pool.population, count)

    return invite


def _poisson(pool: ClientPool) -> Invite:
    """One coin per client, independent of the others, so that possibly no client is invited."""

    def invite(round: int) -> Ids:
        rng = pool.rng(round)
        return subset(rng, pool.population, _heads(pool, rng))

    return invite


def _heads(pool: ClientPool, rng: np.random.Generator) -> int:
    """Draw how many coins show heads; who they are is drawn after it, at no cost for those left out."""
    return int(rng.binomial(pool.population, pool.cohort / pool.population))


def _cyclic(pool: ClientPool, *, groups: int = 4) -> Invite:
    """Time zones: in round t the clients with ``id % groups == (t - 1) % groups`` are available, m of them invited."""
    smallest = pool.population // check_int("groups", groups, 1)
    if pool.cohort > smallest:
        raise BadInputError(
            f"groups = {groups} leaves {smallest} clients available in some rounds, fewer than cohort = {pool.cohort}: "
            f"take at most {pool.population // pool.cohort} groups"
            + (f", or a cohort of at most {smallest}" if smallest else "")
        )

    def invite(round: int) -> Ids:
        turn = (round - 1) % groups
        available = (pool.population - turn + groups - 1) // groups
        return subset(pool.rng(round), available, pool.cohort) * groups + turn

    return invite


def _markov(pool: ClientPool, *, leave: float = 0.1, back: float = 0.1) -> Invite:
    """Clients come and go: one that is present leaves with probability ``leave``, one that is away comes ``back``.

    Presence starts from the chain's stationary law, back / (leave + back). All present are invited if they are m or
    fewer. If no client is present, one of them, all equally likely, becomes present, and the chains go on from there.
    """
    check_probability("leave", leave)
    check_probability("back", back, zero=False)
    available = back / (leave + back)
    seen: tuple[int, npt.NDArray[np.bool_]] = (0, np.zeros(0, np.bool_))

    def present(round: int) -> npt.NDArray[np.bool_]:
        nonlocal seen
        at, state = seen if seen[0] <= round else (0, seen[1])  # an earlier round: replay from the start
        for t in range(at + 1, round + 1):
            rng = generator(pool.seed, "presence", t)
            state = rng.random(pool.population) < (np.where(state, 1 - leave, back) if t > 1 else available)
            if not state.any():
                state[rng.integers(pool.population)] = True
        seen = (round, state)
        return state

    def invite(round: int) -> Ids:
        ids = np.flatnonzero(present(round))
        return ids[subset(pool.rng(round), len(ids), min(pool.cohort, len(ids)))]

    return invite


def _weighted(pool: ClientPool, *, weights: npt.ArrayLike | None = None) -> Invite:
    """One after the other without replacement, each time in proportion to the weights (the clients' sizes if None).

    As a race: client j finishes after an exponential time of rate w_j, and the first m are invited.
    """
    field, given = ("sizes", pool.sizes) if weights is None else ("weights", weights)
    if given is None:
        raise BadInputError("sampler 'weighted' has nothing to weigh by: give the clients' sizes, or weights")
    try:
        w = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise BadInputError(f"{field} = {given!r}: must be numbers, one for each client") from None
    if w.shape != (pool.population,) or not (np.isfinite(w) & (w >= 0)).all():
        raise BadInputError(
            f"{field} of shape {w.shape}: must be {pool.population} finite numbers of at least 0, one for each client"
        )
    able = np.flatnonzero(w)
    if len(able) < pool.cohort:
        raise BadInputError(
            f"{field}: only {len(able)} are above 0, fewer than cohort = {pool.cohort}: lower the cohort"
        )
    log_w = np.log(w[able])

    def invite(round: int) -> Ids:
        finish = np.log(pool.rng(round).standard_exponential(len(able))) - log_w
        return able[np.argpartition(finish, pool.cohort - 1)[: pool.cohort]]

    return invite


def _fixed(pool: ClientPool, *, schedule: Sequence[Sequence[int]] = ()) -> Invite:
    """Round t invites ``schedule[t - 1]``, however many these are."""
    try:
        rounds = [np.asarray(ids, np.int64) for ids in schedule]
    except (TypeError, ValueError):
        raise BadInputError(f"schedule = {schedule!r}: must be lists of client ids, one for each round") from None
    for t, ids in enumerate(rounds, start=1):
        good = ids.ndim == 1 and len(ids) > 0 and len(np.unique(ids)) == len(ids)
        if not good or ids.min() < 0 or ids.max() >= pool.population:
            raise BadInputError(
                f"schedule of round {t} = {ids.tolist()}: must be different client ids from 0 to {pool.population - 1}"
            )

    def invite(round: int) -> Ids:
        if round > len(rounds):
            raise BadInputError(f"round {round} is past the schedule's {len(rounds)} rounds: extend it or run fewer")
        return rounds[round - 1]

    return invite


SAMPLERS: Registry[Invite] = Registry(
    "sampler",
    {
        "uniform": uniform,
        "bernoulli": _bernoulli,
        "poisson": _poisson,
        "cyclic": _cyclic,
        "markov": _markov,
        "weighted": _weighted,
        "fixed": _fixed,
    },
)
