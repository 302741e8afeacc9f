"""The private server: it cuts every client's vector to a bounded length, adds them, and adds noise to the sum.

What is bounded is the vector that the server rule averages: FedAvg's update, FedDPC's update after projection and
scaling. The noisy mean is then given to the rule as if one client had sent it, so a method needs no private twin, and
whatever the rule remembers (FedDPC's last global update) is made from private numbers only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods._algebra import square
from feddpc.methods.base import Cohort, Method, State, Step
from feddpc.methods.fedavg import FedAvg
from feddpc.methods.feddpc import FedDPC
from feddpc.privacy.accounting import epsilon
from feddpc.rng import generator


class ClippedSum:
    """A sum of vectors, each cut to length ``clip`` first: one client more or less moves it by ``clip`` at most.

    >>> total = ClippedSum(1.0, torch.zeros(2))
    >>> for v in torch.tensor([[3.0, 4.0], [0.0, 0.5]]):
    ...     total.add(v)
    >>> total.value, total.cut
    (tensor([0.6000, 1.3000], dtype=torch.float64), 1)
    """

    def __init__(self, clip: float, like: Tensor) -> None:
        self.clip = clip
        self.value = torch.zeros_like(like, dtype=torch.float64)
        self.cut = 0  #: how many were longer

    def add(self, v_d: Tensor) -> None:
        """Take in one client's vector; one whose length is not finite counts as zero."""
        v_d = v_d.double()
        length = float(square(v_d).sqrt())
        if not length <= self.clip:
            self.cut += 1
            if not np.isfinite(length):
                return
            v_d = v_d * (self.clip / length)
        self.value += v_d


@dataclass(frozen=True)
class Mechanism:
    """What makes the models of a run differentially private, and what it costs."""

    clip: float  #: longest vector of a client, as a difference of models
    noise: float  #: standard deviation of the noise on the sum, in multiples of the clip
    delta: float  #: probability with which the promise may fail
    cohort: float  #: clients per round on average; the sum is divided by this, not by the number of participants
    population: int
    lost: int = 0  #: rounds that were run again after a crash, when their models had left the server: they count too
    reproducible: bool = True  #: noise from the experiment's seed, for simulation; else from the operating system

    @property
    def sampling(self) -> float:
        """Probability that a client takes part in a round."""
        return self.cohort / self.population

    def epsilon(self, rounds: int) -> float:
        """Return what ``rounds`` rounds spend, with those that were run again."""
        return epsilon(self.noise, self.sampling, rounds + self.lost, self.delta)

    def describe(self) -> str:
        """Return the mechanism in words."""
        return (
            f"The models are differentially private at client level: clip {self.clip:g}, noise {self.noise:g}, "
            f"sampling {self.sampling:g}, delta {self.delta:g}; every record tells the epsilon spent so far."
        )

    def step(self, method: Method, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """Return the private step of ``method``; for an empty ``cohort`` (and ``up``) it is noise alone."""
        vectors, notes = _vectors(method, server, up, cohort)
        total = ClippedSum(self.clip, w)
        for v_d in vectors:
            total.add(v_d)
        total.value, cut = cohort.across(total.value), cohort.across(torch.tensor(total.cut, device=w.device))
        mean = self.release(total, cohort).to(w.dtype)
        step = method.combine(w, server, {"delta": mean[None]}, cohort.as_one())
        told = {"clipped": int(cut) / max(len(cohort.whole.clients), 1), "epsilon": self.epsilon(cohort.round)}
        return dataclasses.replace(step, notes={**step.notes, **notes, **told})

    def release(self, total: ClippedSum, cohort: Cohort) -> Tensor:
        """Return the noisy sum over the expected cohort, in float64."""
        rng = generator(cohort.seed, "privacy noise", cohort.round) if self.reproducible else np.random.default_rng()
        noise = torch.from_numpy(rng.standard_normal(total.value.numel())).to(total.value.device)
        return (total.value + self.noise * self.clip * noise) / self.cohort


def check(method: Method) -> None:
    """Refuse a method whose server sees or uses more of a client than one vector that can be bounded."""
    if type(method) not in (FedAvg, FedDPC):
        raise BadInputError(
            f"{method.name} cannot be run with privacy: only fedavg and feddpc can. Others send, remember or prepare "
            "more than the one vector that is bounded here, or are not known to do so: choose one of the two, or leave "
            "privacy out"
        )
    if isinstance(method, FedDPC) and method.guard == "exclude":
        raise BadInputError(
            "feddpc: guard = 'exclude' divides by how many clients are left, which would tell about them; with privacy "
            "the divisor is fixed: use guard = 'zero'"
        )


def _vectors(method: Method, server: State, up: State, cohort: Cohort) -> tuple[Iterable[Tensor], State]:
    """Return what the rule averages, one vector per client, in units of the model, and what is reported of it."""
    if not up:
        return (), {}
    rows, notes = method.transform(server, up, cohort)
    return rows["delta"], notes
