"""What the hooks of a method are given and what they return: a client's context, the cohort, the server's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.methods._algebra import exact_sum, weighted_sum
from feddpc.optimizers import ServerOptimizer
from feddpc.rng import generator

State = dict[str, Tensor]
#: Rows per client by name: a stack, or something that can be iterated row by row and averaged, as FedDPC's residuals.
Transformed = Mapping[str, Any]


class ClientContext(NamedTuple):
    """What one client knows during one round."""

    w: Tensor  #: the global model it received, ``w_{t-1}``
    broadcast: State  #: what else the server sent, in this round or once before round 1 (the one-time payload)
    state: State  #: what the client remembers, and in this round what it answered to the probe
    lr: float  #: the local learning rate ``eta_l``
    steps: Tensor  #: ``K_j``, how many local steps it makes in this round


@dataclass(frozen=True)
class Cohort:
    """What the server knows about the clients whose answers it aggregates."""

    round: int
    clients: Tensor  #: ids, ``[m]``
    population: int  #: ``N``
    weights: Tensor  #: float64, sums to 1, ``[m]``
    steps: Tensor  #: ``K_j``, ``[m]``
    client_lr: float  #: ``eta_l``
    server_lr: float  #: ``eta_g``
    slots: State = field(default_factory=dict)  #: what the server remembers of these clients
    sizes: Tensor | None = None  #: samples per client of the population, where clients count by samples, ``[N]``
    seed: int = 0  #: of the experiment
    samples: Tensor | None = None  #: samples per client of the cohort, where clients count by samples, ``[m]``
    momentum: float = 0.0  #: of the clients' local steps

    def select(self, mask: Tensor) -> Cohort:
        """Return the cohort of the clients that ``mask`` marks; their weights add up to one again."""
        clients, samples = self.clients[mask], None if self.samples is None else self.samples[mask]
        if samples is None:
            m = len(clients)
            weights = torch.full((m,), 1 / max(m, 1), dtype=torch.float64, device=clients.device)
        else:
            weights = samples.double() / samples.sum()
        return replace(
            self,
            clients=clients,
            weights=weights,
            steps=self.steps[mask],
            slots={key: rows[mask] for key, rows in self.slots.items()},
            samples=samples,
        )

    @property
    def whole(self) -> Cohort:
        """The cohort of all participants; where several processes share the work, this one may have some of them."""
        return self

    def across(self, partial: Tensor) -> Tensor:
        """Add up, over all processes, what each has summed over its clients; with one process that is all there is.

        What is added up may depend on rows and cohort, but on no other sum: all sums of a round travel at once.
        """
        return partial

    def gathered(self, x_m: Tensor) -> Tensor:
        """Return numbers per client for all participants, to be reported; they may not enter sums."""
        return x_m

    def as_one(self) -> Cohort:
        """Return a cohort of one client, which has sent what all of them together have; every process knows it."""
        one = torch.ones(1, dtype=torch.float64, device=self.weights.device)
        own = {f.name: getattr(self, f.name) for f in fields(Cohort)}
        return Cohort(**own | {"clients": self.clients.new_zeros(1), "weights": one, "steps": one})

    def mean(self, x_md: Tensor) -> Tensor:
        """Average a stack over the cohort (uniformly, unless the experiment weights by samples)."""
        return self.weighted_sum(self.weights, x_md)

    def weighted_sum(self, c_m: Tensor, x_md: Tensor) -> Tensor:
        """Return ``sum_S c_j x_j`` in the stack's own type."""
        return self.across(weighted_sum(c_m, x_md))

    def total(self, x_md: Tensor) -> Tensor:
        """Return these clients' part of the mean over ALL clients, ``1/N sum_S x_j``, in float64."""
        if self.sizes is None:
            return self.across(exact_sum(x_md)) / self.population
        return self.across(exact_sum(x_md, self.sizes[self.clients].double() / self.sizes.sum()))

    def group_shares(self, group_n: Tensor, count: int) -> Tensor:
        """Return the share of each of ``count`` groups in the population; ``group_n`` is the group of every client.

        Sizes are whole numbers, so the sums are exact and do not depend on the order of a GPU's additions.
        """
        sizes = torch.ones_like(group_n) if self.sizes is None else self.sizes
        held = torch.zeros(count, dtype=torch.int64, device=sizes.device).index_add_(0, group_n, sizes)
        return held.double() / sizes.sum()

    def uniforms(self, purpose: str) -> NDArray[np.float64]:
        """Return a uniform number in [0, 1) for each client, ``[m]``, the same for any other participants."""
        return np.array([generator(self.seed, purpose, self.round, int(c)).random() for c in self.clients])


@dataclass(frozen=True)
class Step:
    """What the server rule returns: where to go, ``w_t = w_{t-1} - rate * update``, and what to remember and report.

    Every rule is such a step; `feddpc.round.server_step.apply_step_` makes it, so that there is one model in one place.
    """

    update: Tensor
    rate: float | Tensor
    server: State = field(default_factory=dict)
    slots: State = field(default_factory=dict)
    notes: Mapping[str, Tensor | float] = field(default_factory=dict)

    def optimized(self, optimizer: ServerOptimizer, state: State, cohort: Cohort) -> tuple[Step, State]:
        """Return the step that a server optimizer makes of this one, and the optimizer's new ``state``."""
        delta = self.update * (self.rate / cohort.server_lr)
        direction, state = optimizer.direction(delta, state, cohort.client_lr)
        return replace(self, update=direction, rate=cohort.server_lr), state
