"""The server's half of a round when uploads arrive as messages: sampling, cohorts, probes and the server step.

Only this module of ``feddpc.flower`` imports ``feddpc.round``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc import sampling
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import ClientContext, Cohort, Method, State
from feddpc.optimizers import server_state
from feddpc.policies import Policies
from feddpc.population import Population, ask_some
from feddpc.round import server_step as server_half
from feddpc.round.client_table import ClientTable
from feddpc.round.round import RoundRecord
from feddpc.round.server_step import StepOutcome
from feddpc.round.state import RunState
from feddpc.tasks.base import Batch, Rows, Task

__all__ = ["Ints", "Policies", "RemotePopulation", "RoundRecord", "RunState", "StepOutcome"]

Ints = NDArray[np.int64]
#: Sends the method's probe to clients and returns their answers, stacked; NaN for a client that did not answer.
Ask = Callable[[Ints], State]
#: The last round in which a client's reply counted, for a client none of whose replies has counted yet.
NEVER = -1
#: How many clients of a survey are asked at a time.
SURVEYED_AT_ONCE = 16


def begin_run(method: Method, w: Tensor, population: int, policies: Policies) -> RunState:
    """Return the state before round 1. Per client, the server stores its node and the last round that counted."""
    state = RunState.begin(method, w, population, optimizer=policies.optimizer)
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


class RemotePopulation(Population):
    """Clients on other machines.

    Clients know the experiment's seed. With a ``secret`` seed, and differential privacy, they can predict neither the
    participants nor the noise; noise that they can predict hides nothing from them.
    """

    def __init__(self, config: Config, sizes: Ints, secret: int | None = None) -> None:
        self.policies, seed = Policies.of(config), config.seed
        if self.policies.privacy is not None and secret is not None:
            privacy, seed = dataclasses.replace(self.policies.privacy, reproducible=False), secret
            self.policies = dataclasses.replace(self.policies, privacy=privacy)
        sampler = sampling.make(
            config.participation,
            population=config.clients,
            cohort=config.cohort,
            seed=seed,
            dropout=config.dropout,
            sizes=sizes,
            **config.participation_options,
        )
        super().__init__(config, sizes, sampler, self.policies.faults)

    def known(self, method: Method, state: RunState, t: int, ids: Ints) -> Cohort:
        """Return what the server knows about clients ``ids`` in round ``t``."""
        assert self.config.batch_size is not None
        steps = -(-self.sizes[ids] // self.config.batch_size) * self.config.epochs
        return self.cohort(method, t, ids, steps, state.slots.read(ids), state.w.device)[0]

    def probe(self, method: Method, state: RunState, t: int, ids: Ints, ask: Ask) -> tuple[Ints, State]:
        """Ask the clients that the method wants to ask; return the clients with finite answers, and the answers."""
        return _finite(ids, ask_some(method, state.w, self.known(method, state, t, ids), ids, ask))

    def survey(self, method: Method, state: RunState, ask: Ask) -> None:
        """Send the method's probe to all clients once, before round 1, and let the server learn the mean."""
        total: State = {}
        for first in range(0, len(self), SURVEYED_AT_ONCE):
            ids = np.arange(first, min(first + SURVEYED_AT_ONCE, len(self)))
            ids, answers = _finite(ids, ask(ids))
            counted = torch.zeros(len(ids), dtype=torch.int64)  # in round 0; the nodes are written later
            state.clients.write(ids, {"node": counted, "accepted": counted})
            for key, stack in answers.items():
                part = exact_sum(stack, self.shares(ids))
                total[key] = total[key] + part if key in total else part
        state.server = method.server_state_from_probe(state.server, total) | server_state(state.server)


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
