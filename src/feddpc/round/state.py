"""Where a run stands: the model, what server and clients remember, and the last finished round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.experiment import Experiment
from feddpc.methods.base import Method, State
from feddpc.methods.statistics import STATISTICS
from feddpc.optimizers import SERVER_STATE, ServerOptimizer, server_state
from feddpc.round.client_table import ClientTable
from feddpc.round.placement import ON_DEVICE, Placement
from feddpc.round.server_step import StepOutcome, apply_step_
from feddpc.tasks.base import WorkCounter

Ints = NDArray[np.int64]


@dataclass
class Meter:
    """Counts of one run; ``clients`` counts participations, ``steps`` the local steps of an ordinary participant.

    ``once`` is what each client of the population does before round 1.
    """

    d: int = 0
    clients: int = 0
    steps: int = 0
    down: int = 0
    up: int = 0
    gradients: int = 0
    passes: int = 0
    client_state: int = 0
    server_state: int = 0
    down_once: float = 0
    up_once: float = 0
    gradients_once: float = 0

    def add_work(self, now: WorkCounter, before: WorkCounter) -> None:
        """Count the gradients and passes since ``before``."""
        self.gradients += now.gradients - before.gradients
        self.passes += now.passes - before.passes

    def summary(self) -> dict[str, float]:
        """Return the counts per participant and round, in multiples of d, and the work per local step."""
        if not (self.clients and self.d):
            return {}
        traffic = {k: getattr(self, k) / (self.clients * self.d) for k in ("down", "up")}
        states = {k: getattr(self, k) / self.d for k in ("client_state", "server_state", "down_once", "up_once")}
        work = {k: getattr(self, k) / self.steps for k in ("gradients", "passes")}
        work["gradients_once"] = self.gradients_once
        return {k: round(v, 6) for k, v in (traffic | states | work).items()}


def numbers(tensors: Iterable[Tensor]) -> int:
    """Return how many numbers ``tensors`` hold."""
    return sum(t.numel() for t in tensors)


def _apart(state: State, w: Tensor) -> State:
    """Return a state in which no tensor shares the memory of ``w``, which every round changes in place."""
    memory = w.untyped_storage().data_ptr()
    return {key: x.clone() if x.untyped_storage().data_ptr() == memory else x for key, x in state.items()}


@dataclass
class RunState:
    """Where a run stands: the model, all memories, and the last finished round."""

    w: Tensor
    server: State
    slots: ClientTable
    clients: ClientTable
    round: int = 0
    meter: Meter = field(default_factory=Meter)
    watched: State = field(default_factory=dict)  #: what screening, and simulated attackers, remember of earlier rounds
    statistics: Tensor | None = None  #: mean statistics of the last cohort, if the network measures some
    best: Tensor | None = None  #: the model of the best round so far, where the run keeps that one

    @classmethod
    def begin(
        cls,
        method: Method,
        w: Tensor,
        population: int,
        placement: Placement = ON_DEVICE,
        optimizer: ServerOptimizer | None = None,
        statistics: Tensor | None = None,
        kept: bool = False,
        own: bool = False,
    ) -> RunState:
        """Return the state before round 1; ``w`` itself is left as it is, unless the run may have it as its ``own``.

        ``statistics`` are those of the first model, if its network measures some; ``kept``: every client has its own.
        """
        first = {} if optimizer is None else optimizer.initial(w)
        local = {STATISTICS: statistics} if kept and statistics is not None else {}
        memory = f"{method.name}: a client's memory"
        return cls(
            w=w if own else w.clone(),
            server=_apart(method.init_server(w, population) | {SERVER_STATE + k: v for k, v in first.items()}, w),
            slots=ClientTable(
                lambda: _apart(method.init_slot(w), w),
                f"{method.name}: the server's memory of a client",
                population,
                placement,
                "slots",
            ),
            statistics=None if statistics is None else statistics.clone(),
            clients=ClientTable(
                lambda: _apart(method.init_client(w) | local, w), memory, population, placement, "clients"
            ),
        )

    @classmethod
    def of(
        cls, experiment: Experiment, method: Method, placement: Placement = ON_DEVICE, *, own: bool = False
    ) -> RunState:
        """Return the state of an experiment before round 1; ``own``: it may overwrite the experiment's first model."""
        task, policy = experiment.task, experiment.buffers(method)
        statistics = task.first_statistics if task.traits.statistics else None
        optimizer, population = experiment.policies.optimizer, len(experiment.population)
        return cls.begin(method, experiment.w0, population, placement, optimizer, statistics, policy == "local", own)

    def model(self, method: Method) -> Tensor:
        """Return the model that is evaluated and stored: parameters, and then the network's statistics."""
        w = method.evaluated(self.w, self.server)
        return w if self.statistics is None else torch.cat([w, self.statistics])

    def apply(self, method: Method, outcome: StepOutcome, ids: Ints) -> dict[str, float]:
        """Move the model by what came of the uploads of clients ``ids``; return the method's notes."""
        step = outcome.step
        if step is None:
            self.server = method.on_empty_round(self.server) | server_state(self.server)
            return {}
        apply_step_(self.w, step)
        self.server = step.server
        self.slots.write(ids, step.slots)
        return {name: float(value) for name, value in step.notes.items()}
