"""What all methods of a comparison share, and the cohort of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import BatchPlan, Planner
from feddpc.engines.base import placed
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort, Method, State
from feddpc.privacy import Mechanism
from feddpc.robust.defense import Defense
from feddpc.robust.faults import Faults
from feddpc.round.sampling import Draw, Sampler
from feddpc.round.server_step import Policies
from feddpc.round.state import RunState
from feddpc.tasks.base import Task

Ints = NDArray[np.int64]
Evaluate = Callable[[Tensor], dict[str, float]]


@dataclass(frozen=True)
class Federation:
    """Everything that all methods of a comparison share: the task, who holds what, who comes when, and the rates."""

    task: Task
    planner: Planner
    sampler: Sampler
    client_lr: float
    server_lr: float
    lr_decay: float = 1.0
    weighting: str = "uniform"
    evaluate: Evaluate | None = None
    validate: Evaluate | None = None  #: on samples held out of training
    faults: Faults | None = None  #: which clients misbehave, in simulations of that
    defense: Defense | None = None  #: how the server protects itself, beyond turning away what is not finite
    kit: State = field(default_factory=dict)  #: what every client was given once, before its first round
    once: tuple[float, float] = (0, 0)  #: how many numbers each client received and sent then
    privacy: Mechanism | None = None  #: what makes the models differentially private
    _ahead: dict[int, tuple[Draw, BatchPlan]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sizes: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.planner.partition)

    @property
    def policies(self) -> Policies:
        """What stands between the uploads and the server's step."""
        return Policies(self.defense, self.privacy)

    def look_ahead(self, round: int) -> None:
        """Draw the participants of a round and plan their batches, while the host has nothing else to do."""
        if round in self._ahead:
            return
        try:
            draw = self._draw(round)
        except BadInputError:  # a fixed schedule has an end
            return
        self._ahead.clear()
        self._ahead[round] = draw, self.planner.plan(round, draw.answered)

    def draw(self, round: int) -> Draw:
        """Return who takes part in a round."""
        return self._ahead[round][0] if round in self._ahead else self._draw(round)

    def _draw(self, round: int) -> Draw:
        draw = self.sampler.draw(round)
        if self.faults is None:
            return draw
        return Draw(draw.invited, draw.answered[~self.faults.late(round, draw.answered)])

    def plan(self, round: int, ids: Ints) -> BatchPlan:
        """Return the batches of clients ``ids`` in a round."""
        draw, plan = self._ahead.get(round, (None, None))
        if plan is not None and draw is not None and np.array_equal(draw.answered, ids):
            return plan
        return self.planner.plan(round, ids)

    def weights(self, sizes: Ints) -> NDArray[np.float64]:
        """Return the weights of a cohort's clients with ``sizes`` samples; they add up to one."""
        return sizes / sizes.sum() if self.weighting == "samples" else np.full(len(sizes), 1 / max(len(sizes), 1))

    def shares(self, sizes: Ints) -> Tensor:
        """Return the shares that clients with ``sizes`` samples have in a mean over all."""
        if self.weighting == "uniform":
            return torch.full((len(sizes),), 1 / self.population, dtype=torch.float64)
        return torch.from_numpy(sizes / len(self.planner.partition.order))

    def sizes(self, device: torch.device) -> Tensor | None:
        """Return the samples per client of the population, on ``device``; None where clients count alike."""
        if self.weighting == "uniform":
            return None
        if device not in self._sizes:
            self._sizes[device] = torch.from_numpy(self.planner.partition.sizes).to(device)
        return self._sizes[device]

    def rates(self, round: int) -> tuple[float, float]:
        """Return the local and the server rate of a round; they decay together, so that their ratio stays."""
        decay = self.lr_decay ** (round - 1)
        return self.client_lr * decay, self.server_lr * decay


def build_cohort(
    federation: Federation, method: Method, state: RunState, t: int, ids: Ints
) -> tuple[BatchPlan, Cohort]:
    """Return the batches of clients ``ids`` in round ``t``, and what the server knows about them."""
    client_lr, server_lr = federation.rates(t)
    device = state.w.device
    plan = federation.plan(t, ids)
    cohort = Cohort(
        round=t,
        clients=placed(ids, device),
        population=federation.population,
        weights=placed(federation.weights(plan.sizes), device),
        sizes=federation.sizes(device),
        steps=placed(plan.steps.astype(np.float64), device),
        client_lr=client_lr,
        server_lr=server_lr,
        slots=state.slots.read(ids),
        samples=placed(plan.sizes, device) if federation.weighting == "samples" else None,
        seed=federation.planner.seed,
    )
    training = method.train_mask(cohort)
    if training is None:
        return plan, cohort
    plan = plan.resting(~training)
    return plan, replace(cohort, steps=placed(plan.steps.astype(np.float64), device))
