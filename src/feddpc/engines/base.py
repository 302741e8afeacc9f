"""What an engine is: it runs the client half of a method for a whole cohort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.methods.base import Cohort, Method, State
from feddpc.ranks import ALONE, Ranks
from feddpc.tasks.base import Task

if TYPE_CHECKING:
    from feddpc.experiment import Experiment
    from feddpc.round.exchange import Exchange
    from feddpc.round.state import RunState
    from feddpc.tasks.network import NetworkTask
    from feddpc.validation import HeldOutEvaluator

Ints = NDArray[np.int64]


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
    ranks: Ranks = ALONE  #: the processes that share the run

    def refuses(self, task: Task) -> str | None:
        """Say why this engine cannot run ``task``, or return None."""
        return None

    def cohort(
        self, experiment: Experiment, method: Method, state: RunState, t: int, ids: Ints
    ) -> tuple[BatchPlan, Cohort]:
        """Return the batches that this process trains in round ``t``, and what the server knows of these clients."""
        return experiment.cohort(method, t, ids, state.slots.read(ids))

    def probe_cohort(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort
    ) -> tuple[BatchPlan, Cohort, State]:
        """Put the method's question to the cohort; return the clients with finite answers, and these answers."""
        from feddpc.round.probes import probe_cohort

        return probe_cohort(experiment, method, self, state, plan, cohort)

    def read_ahead(self, experiment: Experiment, t: int) -> None:
        """Read the samples of round ``t`` in the background, if they are in host memory."""
        experiment.read_ahead(t)

    def exchange(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort, probes: State
    ) -> Exchange:
        """Train the cohort and make the server's step; an engine that captures whole rounds overrides this."""
        from feddpc.round.exchange import train_and_step

        return train_and_step(experiment, method, self, state, plan, cohort, probes)

    def evaluate(self, task: Task, w: Tensor) -> dict[str, float]:
        """Return the metrics of model ``w`` on the test set by name."""
        return task.evaluate(w)

    def test_totals(self, task: NetworkTask, w: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the totals of parts of the test set."""
        task.module.eval()
        totals = [task.test_totals(w, x, y) for x, y in batches]
        task.module.train()
        return totals

    def validate(self, evaluator: HeldOutEvaluator, w: Tensor) -> dict[str, float]:
        """Return the metrics of model ``w`` on held-out samples by name."""
        return evaluator(w)

    def clients_here(self, state: RunState, population: int) -> Ints:
        """Return the clients at which this process evaluates models; it has their memories, if there are any."""
        return np.arange(population)

    def of_all_clients(self, clients: Ints, values: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return numbers of all clients by name; ``values`` are those of ``clients``, the ones of this process."""
        return values

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
    """Stack the states of single clients; that of one client is not copied."""
    if len(states) == 1:
        return {key: x[None] for key, x in states[0].items()}
    return {key: torch.stack([s[key] for s in states]) for key in states[0]}
