"""FedCM: clients mix the last global direction into every local step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedCM(Method):
    """Mix the last global direction into every local step.

    Client-level momentum; M is the mean gradient direction of the last round:

    Client j:  y <- y - eta_l [ alpha grad F_j(y; batch) + (1 - alpha) M_{t-1} ]
    Server:    w_t = w_{t-1} - eta_g mean_S D_j
               M_t = mean_S D_j / K_j,   M_0 = 0

    | symbol | name  | default | domain         |
    |--------|-------|---------|----------------|
    | alpha  | alpha | 0.1     | 0 < alpha <= 1 |

    alpha = 1 is FedAvg. In round 1 M = 0, so the local rate is in effect alpha eta_l.

    Departures: with unequal step counts every client's update is divided by its own K_j (public codes take client 0's,
    or the receiver's). The server rate is tied to eta_l like every method's here; the paper's eta_g = eta_l K is the
    same step.

    Confidence: paper (through summaries) and two public re-implementations; no official code is known.

    >>> FedCM().hyper()
    {'alpha': 0.1}
    """

    name: ClassVar[str] = "fedcm"
    title: ClassVar[str] = "FedCM"
    reference: ClassVar[str] = "Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021, arXiv:2106.10874"
    costs: ClassVar[Costs] = Costs(down="2", server_state="1", client_work="2d per step", server_work="d")
    needs_only_sums: ClassVar[bool] = True

    alpha: float = 0.1

    def __post_init__(self) -> None:
        self.require(0 < self.alpha <= 1, "alpha", "0 < alpha <= 1")

    def init_server(self, w: Tensor, population: int) -> State:
        """No direction yet."""
        return {"M": torch.zeros_like(w)}

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """The direction is sent along with the model."""
        return {"M": server["M"]}

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """Mix the gradient with the last global direction."""
        return self.alpha * g + (1 - self.alpha) * ctx.broadcast["M"]

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """FedAvg, and the mean direction for the next round."""
        per_step = cohort.weights / (cohort.client_lr * cohort.steps)
        step = super().combine(w, server, rows, cohort)
        return replace(step, server={"M": cohort.weighted_sum(per_step, rows["delta"])})
