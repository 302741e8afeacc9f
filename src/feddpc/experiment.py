"""What will be computed, for every method and on every engine: one experiment, with nothing left open."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.batches import BatchPlan, Planner
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.federated_data import FederatedData, Ids
from feddpc.methods.local_steps import with_optimizer
from feddpc.methods.statistics import with_statistics
from feddpc.participants import Draw, Sampler
from feddpc.policies import Policies, server_optimizer
from feddpc.population import Population
from feddpc.registry import short_name
from feddpc.tasks.metrics import PARTS
from feddpc.tasks.network import NetworkTask
from feddpc.validation import HeldOutEvaluator, held_out_evaluator


@dataclass(frozen=True, repr=False)
class Experiment:
    """Everything that the methods of a comparison share for one seed; `feddpc.build.build` makes it.

    ``config`` is resolved, but for where and how fast it is computed. A method that changes data, network or first
    model gets an experiment of its own (`feddpc.method_changes.for_method`).
    """

    config: Config
    data: Dataset
    partition: Partition  #: as it was drawn, before the method changed it
    task: NetworkTask  #: what is learned, with the data on the device
    planner: Planner  #: who holds which samples, and their batches
    sampler: Sampler  #: who takes part when
    w0: Tensor  #: the first model
    policies: Policies = field(default_factory=Policies)
    reserved_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))  #: training samples that the server keeps
    held_out: Ids = field(default_factory=lambda: np.zeros(0, np.int64))  #: training samples that no client gets
    client_tests: Partition | None = None  #: samples of each client on which models are evaluated at that client
    evaluates: bool = True  #: False: rounds are timed or compared without evaluation
    learned: State = field(default_factory=dict)  #: what the method found out before round 1
    world: FederatedData | None = None  #: what the method made of data and partition, if it changed any
    one_time_payload: State = field(default_factory=dict)  #: what every client was given once, before its first round
    once: tuple[float, float] = (0, 0)  #: how many numbers each client received and sent then
    validate: HeldOutEvaluator | None = None  #: evaluates models on the held-out samples
    threads: int | None = None  #: CPU threads of its runs; None leaves them as they are
    population: Population = field(init=False, repr=False, compare=False)
    #: What records call the metrics of each part of the data, and what evaluations call them.
    record_keys: dict[str, dict[str, str]] = field(init=False, repr=False, compare=False)
    _ahead: dict[int, tuple[Draw, BatchPlan]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        population = Population(self.config, self.planner.partition.sizes, self.sampler, self.policies.faults)
        object.__setattr__(self, "population", population)
        keys = {part: {metric.key(part): metric.name for metric in self.task.metrics} for part in PARTS}
        object.__setattr__(self, "record_keys", keys)
        # From the configuration, since runs with other optimizers may share all that was built.
        policies = dataclasses.replace(self.policies, optimizer=server_optimizer(self.config))
        object.__setattr__(self, "policies", policies)

    def local(self, method: Method, statistics: Tensor | None = None) -> Method:
        """Return ``method`` with the local steps of this experiment's client optimizer.

        If the network measures statistics, with a client half that carries them; ``statistics`` are the global ones.
        """
        local = method if self.population.plain_steps else with_optimizer(method, self.population.optimizer)
        return local if statistics is None else with_statistics(local, statistics)

    def buffers(self, method: Method) -> Literal["average", "local"]:
        """Return what happens to statistics of the network with ``method``, or refuse what does not fit it."""
        wanted, statistics = self.config.buffers, self.task.traits.statistics
        if not statistics:
            return "average"  # of nothing
        remedy = "convert the model with feddpc.models.to_groupnorm"
        if wanted == "refuse":
            raise BadInputError(
                f"buffers = 'refuse', and training changes buffer {statistics[0]!r} of the model: {remedy}"
            )
        if wanted == "local" or (wanted == "auto" and method.keeps_statistics):
            return "local"
        if method.keeps_statistics:
            raise BadInputError(f"buffers = 'average', but {method.name} keeps them with the clients: leave it out")
        guards = {"privacy": self.policies.privacy, "rule or screen": self.policies.defense}
        for name in (name for name, guard in guards.items() if guard is not None):
            raise BadInputError(
                f"buffers = 'average' with {name}: it does not see buffers such as {statistics[0]!r}, so that one "
                f"client could set them, or be known by them: use buffers = 'local', or {remedy}"
            )
        return "average"

    def __repr__(self) -> str:
        config = self.config
        parts = f"{short_name(config.model)} on {self.data.name}, {len(self.partition)} clients"
        return f"<Experiment: {parts}, {config.cohort} per round, seed {config.seed}>"

    def with_task(self, task: NetworkTask, **changes: Any) -> Experiment:
        """Return this experiment with another task, on which models are evaluated too."""
        validate = None if self.validate is None else held_out_evaluator(task, self.data, self.held_out)
        return dataclasses.replace(self, task=task, validate=validate, **changes)

    @property
    def step_work(self) -> int:
        """The work of a local step: parameters times batch size, for tokens times their number per sample."""
        positions = self.data.y_train.shape[1] if self.data.target == "tokens" else 1
        return self.task.d * self.planner.batch_size * positions

    def evaluates_in(self, t: int) -> bool:
        """Return whether the model is evaluated after round ``t``."""
        return self.evaluates and evaluated_in(self.config, t)

    # A round's participants and batches.

    def draw(self, t: int) -> Draw:
        """Return who is invited to round ``t``, and who answers."""
        return self._ahead[t][0] if t in self._ahead else self.population.draw(t)

    def plan(self, t: int, ids: Ids) -> BatchPlan:
        """Return the batches of clients ``ids`` in round ``t``."""
        draw, plan = self._ahead.get(t, (None, None))
        if plan is not None and draw is not None and np.array_equal(draw.answered, ids):
            return plan
        return self.planner.plan(t, ids)

    def look_ahead(self, t: int) -> None:
        """Draw the participants of round ``t`` and plan their batches, while the host has nothing else to do."""
        if t in self._ahead:
            return
        try:
            draw = self.population.draw(t)
        except BadInputError:  # a fixed schedule has an end
            return
        self._ahead.clear()
        self._ahead[t] = draw, self.planner.plan(t, draw.answered)

    def cohort(self, method: Method, t: int, ids: Ids, slots: State) -> tuple[BatchPlan, Cohort]:
        """Return the batches of clients ``ids`` in round ``t``, and what the server knows about these clients."""
        plan = self.staged(self.plan(t, ids))
        cohort, training = self.population.cohort(method, t, ids, plan.steps, slots, self.w0.device)
        return plan if training is None else plan.resting(~training), cohort

    def staged(self, plan: BatchPlan) -> BatchPlan:
        """Bring the samples of a plan to the device, if they are in host memory, and return it for where they lie."""
        if self.task.host is None or not len(plan.clients):
            return plan
        return self.task.host.stage(plan, self.planner.partition)

    def read_ahead(self, t: int) -> None:
        """Read the samples of the participants of round ``t`` in the background, if they are in host memory."""
        if self.task.host is not None and t <= self.config.rounds:
            with suppress(BadInputError):  # a fixed schedule has an end
                self.task.host.read_ahead(self.draw(t).answered, self.planner.partition)


def evaluated_in(config: Config, t: int) -> bool:
    """Return whether the model is evaluated after round ``t``: every few rounds, and after the last one."""
    return t % config.evaluate_every == 0 or t == config.rounds
