"""The server's half of a round when uploads arrive as messages: sampling, cohorts, probes and the server step.

Only this module of ``feddpc.flower`` imports ``feddpc.round``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import ClientContext, Cohort, Method, State
from feddpc.privacy.config import make_mechanism
from feddpc.robust.config import defense_of, faults_of
from feddpc.robust.faults import Faults
from feddpc.round import sampling
from feddpc.round import server_step as server_half
from feddpc.round.client_table import ClientTable
from feddpc.round.round import RoundRecord
from feddpc.round.sampling import Draw
from feddpc.round.server_step import StepOutcome
from feddpc.round.state import RunState
from feddpc.tasks.base import Batch, Rows, Task

__all__ = ["Ints", "Policies", "Population", "RoundRecord", "RunState", "StepOutcome"]

Ints = NDArray[np.int64]
#: Sends the method's probe to clients and returns their answers, stacked; NaN for a client that did not answer.
Ask = Callable[[Ints], State]
#: The last round in which a client's reply counted, for a client none of whose replies has counted yet.
NEVER = -1
#: How many clients of a survey are asked at a time.
SURVEYED_AT_ONCE = 16


@dataclass(frozen=True)
class Policies(server_half.Policies):
    """What a server does in addition to the method's own rule."""

    faults: Faults | None = None  #: in simulations of clients that misbehave


def begin_run(method: Method, w: Tensor, population: int) -> RunState:
    """Return the state before round 1. Per client, the server stores its node and the last round that counted."""
    state = RunState.begin(method, w, population)
    fresh = {"node": torch.zeros((), dtype=torch.int64), "accepted": torch.full((), NEVER)}
    state.clients = ClientTable(lambda: fresh, "the server's record of a client", population)
    return state


def server_step(
    method: Method, state: RunState, uploads: State, cohort: Cohort, policies: Policies, min_clients: int
) -> StepOutcome:
    """Return the server's step for the uploads of a cohort, which may be empty.

    If fewer than ``min_clients`` uploads are within the bound on norms, none counts.
    """
    outcome = server_half.server_step(
        method, state.w, state.server, uploads, cohort, policies, state.watched, minimum=min_clients
    )
    state.watched = outcome.watched
    if policies.faults is not None and outcome.step is not None and len(outcome.kept):
        state.watched = policies.faults.saw(outcome.step.update, state.watched)
    return outcome


class Population:
    """Clients on other machines as the server knows them: who takes part in a round, with what weight and how long.

    Clients know the experiment's seed. With a ``secret`` seed, and differential privacy, they can predict neither the
    participants nor the noise; noise that they can predict hides nothing from them.
    """

    def __init__(self, config: Config, sizes: Ints, secret: int | None = None) -> None:
        assert config.batch_size is not None
        self.config, self.sizes, self.batch_size = config, sizes, config.batch_size
        privacy, seed = make_mechanism(config), config.seed
        if privacy is not None and secret is not None:
            privacy, seed = dataclasses.replace(privacy, reproducible=False), secret
        self.policies = Policies(defense_of(config), privacy, faults_of(config, config.clients))
        self.sampler = sampling.make(
            config.participation,
            population=config.clients,
            cohort=config.cohort,
            seed=seed,
            dropout=config.dropout,
            sizes=sizes,
            **config.participation_options,
        )

    def draw(self, t: int) -> Draw:
        """Return who is invited in round ``t`` and who of them answers; simulated stragglers do not."""
        draw, faults = self.sampler.draw(t), self.policies.faults
        return draw if faults is None else Draw(draw.invited, draw.answered[~faults.late(t, draw.answered)])

    def stragglers(self, t: int) -> dict[str, list[int]]:
        """Return the simulated stragglers of round ``t``, as a record lists faults."""
        if self.policies.faults is None:
            return {}
        dropped = self.draw(t).dropped
        late = dropped[self.policies.faults.late(t, dropped)].tolist()
        return {"straggler": late} if late else {}

    def cohort(self, method: Method, state: RunState, t: int, ids: Ints) -> Cohort:
        """Return what the server knows about clients ``ids`` in round ``t``."""
        config, sizes = self.config, self.sizes[ids]
        by_samples, decay = config.weighting == "samples", config.lr_decay ** (t - 1)
        steps = -(-sizes // self.batch_size) * config.epochs
        cohort = Cohort(
            round=t,
            clients=torch.from_numpy(ids),
            population=config.clients,
            weights=torch.from_numpy(sizes / sizes.sum() if by_samples else np.full(len(ids), 1 / max(len(ids), 1))),
            sizes=torch.from_numpy(self.sizes) if by_samples else None,
            steps=torch.from_numpy(steps.astype(np.float64)),
            client_lr=config.lr * decay,
            server_lr=(config.lr if config.server_lr is None else config.server_lr) * decay,
            slots=state.slots.read(ids),
            seed=config.seed,
            samples=torch.from_numpy(sizes) if by_samples else None,
        )
        if (training := method.train_mask(cohort)) is None:
            return cohort
        return dataclasses.replace(cohort, steps=torch.from_numpy(np.where(training, steps, 0).astype(np.float64)))

    def probe(self, method: Method, state: RunState, t: int, ids: Ints, ask: Ask) -> tuple[Ints, State]:
        """Ask the clients that the method wants to ask; return the clients with finite answers, and the answers."""
        asked = method.probe_mask(self.cohort(method, state, t, ids))
        if asked is None:
            probed = ask(ids)
        else:
            probed = {k: v.expand(len(ids), *v.shape).clone() for k, v in method.default_probe(state.w).items()}
            answers = ask(ids[asked]) if asked.any() else {}
            for key, stack in answers.items():
                probed[key][torch.from_numpy(np.flatnonzero(asked))] = stack
        return _finite(ids, probed)

    def survey(self, method: Method, state: RunState, ask: Ask) -> None:
        """Send the method's probe to all clients once, before round 1, and let the server learn the mean."""
        total: State = {}
        n, samples = self.config.clients, int(self.sizes.sum())
        for first in range(0, n, SURVEYED_AT_ONCE):
            ids = np.arange(first, min(first + SURVEYED_AT_ONCE, n))
            ids, answers = _finite(ids, ask(ids))
            counted = torch.zeros(len(ids), dtype=torch.int64)  # in round 0; the nodes are written later
            state.clients.write(ids, {"node": counted, "accepted": counted})
            uniform = torch.full((len(ids),), 1 / n, dtype=torch.float64)
            shares = uniform if self.config.weighting == "uniform" else torch.from_numpy(self.sizes[ids] / samples)
            for key, stack in answers.items():
                part = exact_sum(stack, shares)
                total[key] = total[key] + part if key in total else part
        state.server = method.server_state_from_probe(state.server, total)


def _finite(ids: Ints, answers: State) -> tuple[Ints, State]:
    """Return the clients whose answers are finite, and these answers."""
    finite = server_half.finite_rows(answers)
    return (ids, answers) if finite is None else (ids[finite.numpy()], server_half.select_rows(finite, answers))


class RemoteTask(Task):
    """The task of clients on other machines: it has the right size, and gradients that only have the right shape."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d

    def fetch(self, rows: Rows) -> Batch:
        """Refuse: the server has no samples of clients."""
        raise BadInputError("the samples are with the clients")

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return zero."""
        return y.sum() * 0

    def full_gradient(self, y: Tensor, data: Iterable[Rows]) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(y)


def probe_template(method: Method, w: Tensor) -> State:
    """Return an answer to the method's probe: names, shapes and types count, values do not."""
    return method.probe(RemoteTask(w.numel()), w, [])


def upload_template(method: Method, w: Tensor, broadcast: State) -> State:
    """Return what one client uploads: names, shapes and types count, values do not."""
    probed = probe_template(method, w) if method.probes else {}
    ctx = ClientContext(w, broadcast, method.init_client(w) | probed, 1.0, torch.ones((), dtype=w.dtype))
    up, _ = method.finish(method.start(ctx), ctx)
    return up


def trial_cohort(m: int, population: int = 2, slot: State | None = None) -> Cohort:
    """Return a cohort to try a method on; the numbers of local steps are unknown."""
    return Cohort(
        round=1,
        clients=torch.arange(m),
        population=population,
        weights=torch.full((m,), 1 / m, dtype=torch.float64),
        steps=torch.full((m,), torch.nan, dtype=torch.float64),
        client_lr=1.0,
        server_lr=1.0,
        slots={k: v.expand(m, *v.shape).clone() for k, v in (slot or {}).items()},
    )
