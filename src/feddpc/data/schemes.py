"""Partition schemes: how to divide samples among clients, and a summary of how uneven the result is.

| name | what differs between clients |
|---|---|
| ``dirichlet`` | labels and sizes; Yurochkin et al. 2019, used in the paper |
| ``dirichlet-equal`` | labels only; a class prior per client, as in FedDyn |
| ``shards`` | labels only; a few pieces of the sorted data per client, McMahan et al. 2017 |
| ``quantity`` | sizes only |
| ``iid`` | nothing |
| ``natural`` | what differs in the data themselves: one client per id in ``Dataset.client_ids`` |

A scheme is a function that gets what it names of ``labels`` (the targets), ``samples`` (their number), ``clients``,
``seed`` and ``client_ids``. Its other parameters are options. It returns ``(order, sizes)``: the sample indices of all
clients in order, and the number of samples per client. Every scheme here uses every sample exactly once. A function of
the user's own, registered or named as ``FILE.py:FUNCTION``, may also return a list with the sample indices of each
client, or a :class:`Partition`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feddpc.checks import check_int, check_positive
from feddpc.data.partition import Ids, Partition, integers
from feddpc.errors import BadInputError
from feddpc.registry import Registry
from feddpc.rng import generator

Split = tuple[Ids, Ids]

# Shares are ratios of gamma variables, whose sum overflows far above this alpha. At this alpha all shares are equal.
_LARGEST_ALPHA = 1e100


def resolve_min_size(samples: int, clients: int, min_size: int | None = None) -> int:
    """Return the smallest client size allowed: ``min_size`` if given, else 10, or less for small data sets.

    The default is the 10 of Yurochkin et al. when clients have at least 100 samples on average, otherwise a tenth of
    the average, and never less than 1.

    >>> resolve_min_size(50_000, 100), resolve_min_size(1437, 100), resolve_min_size(1437, 20)
    (10, 1, 7)
    """
    average = samples // clients
    if min_size is None:
        return 10 if average >= 100 else max(1, average // 10)
    size = check_int("min_size", min_size, 1)
    if size > average:
        remedy = f"at most {average} is possible" if average else f"there are fewer samples ({samples}) than clients"
        raise BadInputError(f"min_size = {size} for {clients} clients needs {size * clients} samples: {remedy}")
    return size


def dirichlet(labels: Ids, clients: int, seed: int, *, alpha: float = 0.2, min_size: int | None = None) -> Split:
    """Split each class among the clients by Dirichlet shares (Yurochkin et al. 2019, the paper's partition).

    Class after class, in label order: shares p ~ Dir(alpha) over clients, set to zero for clients that already hold an
    average client's samples, renormalized, and the shuffled class is cut at floor(cumsum(p) * its size). All of this is
    repeated with the next draws of the stream until the smallest client has ``min_size`` samples.

    The stream is NumPy's legacy generator and the draws come in the order of the original code, so ``seed=0`` gives the
    same partition as the original code after ``np.random.seed(0)``.
    """
    concentration = min(check_positive("alpha", alpha), _LARGEST_ALPHA)
    least = resolve_min_size(len(labels), clients, min_size)
    stream = np.random.RandomState(check_int("seed", seed, 0, 2**32 - 1))
    by_class = _by_class(labels)
    # Give up after a few seconds. Small data sets, where a try fails more often, get more tries.
    tries = int(np.clip(10**8 // (len(labels) + len(by_class) * clients), 10, 5000))
    best = 0
    for _ in range(tries):
        drawn = _yurochkin_try(by_class, clients, len(labels) / clients, concentration, stream)
        if drawn is None:
            continue
        order, sizes = drawn
        if sizes.min() >= least:
            for mine in np.split(order, np.cumsum(sizes)[:-1]):
                stream.shuffle(mine)
            return order, sizes
        best = max(best, int(sizes.min()))
    lower = f"set min_size = {best} (the smallest client of the best try), " if best else ""
    raise BadInputError(
        f"partition 'dirichlet' with alpha = {alpha}: {tries} tries never gave each of {clients} clients "
        f"min_size = {least} of the {len(labels)} samples: {lower}use fewer clients, "
        "a larger alpha or the partition 'dirichlet-equal'"
    )


def _yurochkin_try(
    by_class: list[Ids], clients: int, fair: float, alpha: float, stream: np.random.RandomState
) -> Split | None:
    """Try once. Return None if the shares of all clients below the average size are 0 (at a tiny alpha)."""
    sizes = np.zeros(clients, np.int64)
    shuffled, owners = [], []
    for members in by_class:
        members = members.copy()
        stream.shuffle(members)
        p = stream.dirichlet(np.full(clients, alpha))
        p[sizes >= fair] = 0.0
        mass = p.sum()
        if not 0 < mass < np.inf:
            return None
        cuts = np.minimum((np.cumsum(p / mass) * len(members)).astype(np.int64), len(members))
        cuts[-1] = len(members)
        share = np.diff(cuts, prepend=0)
        sizes += share
        shuffled.append(members)
        owners.append(np.repeat(np.arange(clients), share))
    return np.concatenate(shuffled)[np.argsort(np.concatenate(owners), kind="stable")], sizes


def dirichlet_equal(labels: Ids, clients: int, seed: int, *, alpha: float = 0.2) -> Split:
    """Give every client the same number of samples, with classes drawn from its own prior Dir(alpha) (as in FedDyn).

    No sample is used twice. All clients request classes at once, by a multinomial draw from their priors. If a class is
    requested more often than it has samples, they go to randomly chosen requests, and the other requests are drawn
    again from the priors, renormalized over the remaining classes (uniform, if these have no weight). Each repetition
    uses up a class, so there are at most as many as classes. The first clients get one more sample each if the division
    leaves a remainder.
    """
    rng = generator(seed, "partition")
    by_class = [rng.permutation(members) for members in _by_class(labels)]
    prior = _dirichlet_rows(rng, check_positive("alpha", alpha), clients, len(by_class))
    stock = np.array([len(members) for members in by_class])
    sizes = _even(len(labels), clients)
    counts, missing = np.zeros((clients, len(stock)), np.int64), sizes.copy()
    while missing.any():
        prior[:, stock == 0] = 0.0
        prior[prior.sum(1) == 0.0] = stock > 0
        prior /= prior.sum(1, keepdims=True)
        granted = rng.multinomial(missing, prior)
        for r in np.flatnonzero(granted.sum(0) > stock):
            granted[:, r] = rng.multivariate_hypergeometric(granted[:, r], stock[r], method="marginals")
        counts += granted
        stock = stock - granted.sum(0)
        missing = missing - granted.sum(1)
    owners = np.concatenate([np.repeat(np.arange(clients), column) for column in counts.T])
    return np.concatenate(by_class)[np.argsort(owners, kind="stable")], sizes


def shards(labels: Ids, clients: int, seed: int, *, shards: int = 2) -> Split:
    """Sort by label, cut into ``clients * shards`` pieces, give ``shards`` to each client (McMahan et al. 2017)."""
    per_client = check_int("shards", shards, 1)
    pieces = clients * per_client
    if pieces > len(labels):
        raise BadInputError(
            f"shards = {per_client} for {clients} clients cuts {len(labels)} samples into {pieces} pieces, some empty: "
            f"use at most {len(labels) // clients} shards, or fewer clients"
        )
    lengths = _even(len(labels), pieces)
    starts = np.cumsum(lengths) - lengths
    drawn = generator(seed, "partition").permutation(pieces)
    # Positions of the pieces in their new order: the start of each piece plus the offset within it.
    within = np.arange(len(labels)) - np.repeat(np.cumsum(lengths[drawn]) - lengths[drawn], lengths[drawn])
    order = np.argsort(labels, kind="stable")[np.repeat(starts[drawn], lengths[drawn]) + within]
    return order, lengths[drawn].reshape(clients, per_client).sum(1)


def quantity(samples: int, clients: int, seed: int, *, alpha: float = 0.5, min_size: int | None = None) -> Split:
    """Give clients very different amounts of similar data: sizes from Dir(alpha), labels at random.

    Every client first gets ``min_size`` samples, and Dirichlet shares divide the rest. So no draw fails, unlike drawing
    again until all clients are large enough.
    """
    least = resolve_min_size(samples, clients, min_size)
    rng = generator(seed, "partition")
    p = _dirichlet_rows(rng, check_positive("alpha", alpha), 1, clients)[0]
    rest = samples - clients * least
    exact = p * rest
    sizes = exact.astype(np.int64)
    # Rounding down leaves less than one sample per client; the clients with the largest fractions get them.
    sizes[np.argsort(sizes - exact, kind="stable")[: rest - sizes.sum()]] += 1
    return rng.permutation(samples), sizes + least


def iid(samples: int, clients: int, seed: int) -> Split:
    """Shuffle and split evenly; the first clients get one more sample each if there is a remainder."""
    return generator(seed, "partition").permutation(samples), _even(samples, clients)


def natural(client_ids: npt.NDArray[Any]) -> Partition:
    """Give each client the samples that carry its id; clients are in the order of their sorted ids."""
    return Partition.from_owners(client_ids)


def _by_class(labels: Ids) -> list[Ids]:
    """Return the ascending sample indices of each class that occurs, in label order."""
    order = np.argsort(labels, kind="stable")
    _, firsts = np.unique(labels[order], return_index=True)
    return np.split(order, firsts[1:])


def _even(total: int, parts: int) -> Ids:
    return np.full(parts, total // parts, np.int64) + (np.arange(parts) < total % parts)


def _dirichlet_rows(rng: np.random.Generator, alpha: float, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """Draw rows of Dir(alpha). Where all weights underflow, use the limit: all weight on one random column."""
    p = rng.dirichlet(np.full(columns, min(alpha, _LARGEST_ALPHA)), size=rows)
    lost = np.flatnonzero(~(np.isfinite(p).all(1) & (p.sum(1) > 0)))
    p[lost] = 0.0
    p[lost, rng.integers(columns, size=len(lost))] = 1.0
    return p


PARTITIONS: Registry[Any] = Registry(
    "partition",
    {
        "dirichlet": dirichlet,
        "dirichlet-equal": dirichlet_equal,
        "shards": shards,
        "quantity": quantity,
        "iid": iid,
        "natural": natural,
    },
    arguments=("labels", "samples", "clients", "seed", "client_ids"),
    accepts=inspect.isfunction,
)
#: Schemes that divide the samples of each class.
_BY_CLASS = ("dirichlet", "dirichlet-equal", "shards")


def names() -> list[str]:
    """Return the names of the schemes."""
    return PARTITIONS.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a scheme with their defaults.

    >>> options("dirichlet")
    {'alpha': 0.2, 'min_size': None}
    """
    return PARTITIONS.options(name)


def uses_client_ids(name: str) -> bool:
    """Say whether a scheme looks at who holds each sample.

    >>> uses_client_ids("natural"), uses_client_ids("iid")
    (True, False)
    """
    return "client_ids" in inspect.signature(PARTITIONS.builder(name, {})).parameters


def make(
    name: str,
    labels: npt.ArrayLike,
    clients: int | None,
    *,
    seed: int,
    client_ids: npt.ArrayLike | None = None,
    **options: object,
) -> Partition:
    """Divide samples with these labels among ``clients`` clients. Each sample goes to one client, and none is empty.

    Args:
        name: one of `names()`.
        labels: the target of each sample. Schemes that divide the samples of each class need class numbers; the others
            only count the targets.
        clients: the number of clients; None lets the scheme decide, as "natural" does.
        seed: equal seeds give equal partitions.
        client_ids: the id of each sample's owner, which "natural" needs.
        options: options of the scheme, see `options`.

    >>> make("shards", [0, 1, 0, 1], clients=2, seed=0, shards=1).counts([0, 1, 0, 1], 2).tolist()
    [[2, 0], [0, 2]]
    """
    parameters = inspect.signature(PARTITIONS.builder(name, options)).parameters
    y = np.asarray(labels)
    if name in _BY_CLASS:
        y = integers(
            "labels",
            y,
            f"partition = {name!r} divides the samples of each class; for other targets, use partition = 'iid', "
            "'quantity' or 'natural'",
        )
    if clients is not None and check_int("clients", clients, 1) > len(y):
        raise BadInputError(f"clients = {clients}, but there are only {len(y)} samples: use at most {len(y)} clients")
    if "client_ids" in parameters:
        if client_ids is None and parameters["client_ids"].default is inspect.Parameter.empty:
            raise BadInputError(
                f"partition = {name!r} needs the client of each sample, but the data have no client_ids: give "
                "client_ids to the data set, or use partition = 'iid'"
            )
        if client_ids is not None and len(ids := np.asarray(client_ids)) != len(y):
            raise BadInputError(f"client_ids has {len(ids)} ids for {len(y)} samples: give one id per sample")
    elif clients is None and "clients" in parameters:
        raise BadInputError(f"partition = {name!r} needs the number of clients: give clients")
    available = {"labels": y, "samples": len(y), "clients": clients, "seed": seed, "client_ids": client_ids}
    drawn = PARTITIONS.build(name, available, options)
    if isinstance(drawn, tuple) and len(drawn) == 2:
        drawn = Partition.from_sizes(*drawn)
    elif isinstance(drawn, Sequence):
        drawn = Partition.from_lists(drawn)
    if not isinstance(drawn, Partition) or clients not in (None, len(drawn)):
        what = f"{len(drawn)} clients" if isinstance(drawn, Partition) else f"a {type(drawn).__name__}"
        raise BadInputError(
            f"partition {name!r} returned {what}: it must return a list with the sample indices of each of the "
            f"{clients} clients"
        )
    return drawn


def summary(partition: Partition, labels: npt.ArrayLike, classes: int) -> dict[str, float]:
    """Return numbers that describe how uneven a partition is.

    ``mean_label_distance`` is the mean over clients of the total-variation distance between the client's label
    distribution and that of all the data: 0 for equal, towards 1 for disjoint. Targets that are not class numbers have
    no label distribution; then only sizes are described.
    """
    sizes = partition.sizes
    about: dict[str, float] = {
        "clients": len(partition),
        "samples": int(sizes.sum()),
        "min_size": int(sizes.min()),
        "median_size": float(np.median(sizes)),
        "max_size": int(sizes.max()),
        "std_size": float(sizes.std()),
    }
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        return about
    counts = partition.counts(y, classes)
    everyone = np.bincount(y, minlength=classes)
    gap = np.abs(counts / np.maximum(sizes, 1)[:, None] - everyone / everyone.sum()).sum(1) / 2
    return about | {"mean_classes": float((counts > 0).sum(1).mean()), "mean_label_distance": float(gap.mean())}
