"""What an engine is: it runs the client half of a method for a whole cohort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.methods.base import Cohort, Method, State
from feddpc.tasks.base import Task

if TYPE_CHECKING:
    from feddpc.experiment import Experiment
    from feddpc.round.exchange import Exchange
    from feddpc.round.state import RunState


class Trained(NamedTuple):
    """What came out of local training, stacked over the cohort."""

    uploads: State  #: what the clients send
    memory: State  #: what they remember from now on
    loss: Tensor  #: mean over a client's steps of the objective during training, ``[m]``


class Prober(Protocol):
    """Whatever can put a method's question to clients; every engine can."""

    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Return what the clients of ``plan`` answer, stacked."""


class Engine(ABC):
    """Runs the client half of a method for every client of a plan. All engines give the same numbers."""

    name: ClassVar[str]
    chunk: int | None = None  #: how many clients fit into memory at once, once that is known

    def refuses(self, task: Task) -> str | None:
        """Say why this engine cannot run ``task``, or return None."""
        return None

    def exchange(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort, probes: State
    ) -> Exchange:
        """Train the cohort and make the server's step; an engine that captures whole rounds overrides this."""
        from feddpc.round.exchange import train_and_step

        return train_and_step(experiment, method, self, state, plan, cohort, probes)

    def evaluate(self, task: Task, w: Tensor) -> dict[str, float]:
        """Return the metrics of model ``w`` on the test set by name."""
        return task.evaluate(w)

    def release(self) -> None:
        """Give back at once what is kept from round to round, the memory of graphs above all; a run has ended."""
        return

    @abstractmethod
    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Return what the clients answer to the method's probe, stacked; ``plan`` is one pass over their data."""

    @abstractmethod
    def train(
        self, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
    ) -> Trained:
        """Train every client of ``plan`` from ``w``."""


def stack(states: Sequence[State]) -> State:
    """Stack the states of single clients."""
    return {key: torch.stack([s[key] for s in states]) for key in states[0]}
