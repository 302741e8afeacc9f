"""FedBN: every client keeps its own normalization layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Costs, Method, State
from feddpc.tasks.base import Batch, Task


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """FedAvg for all parameters but the scales and shifts of normalization layers, which stay with the client.

    Client j keeps beta_j, its scales and shifts, at first those of the global model; theta is the rest of the model.

    Client j, K_j steps from (theta_{t-1}, beta_j):   y <- y - eta_l grad F_j(y; batch)
    Client j sends                                    theta_{t-1} - theta(y), and keeps beta_j = beta(y)
    Server                                            theta_t = theta_{t-1} - eta_g mean_S D_j

    The statistics of BatchNorm stay with the client too. Without normalization layers this is FedAvg.

    Which model is evaluated? At a client that has taken part (``evaluate_clients``): theta_t with the client's own
    beta_j and statistics, which is what FedBN is for. The global model, and a client that never took part: theta_t with
    mean scales, shifts and statistics.

    Departures: clients also send how their scales and shifts moved, and the server adds the mean, only so that there is
    a global model to evaluate, and to begin with for a client that comes for the first time. GroupNorm, LayerNorm and
    InstanceNorm stay local as BatchNorm does (the paper has BatchNorm only). Uniform weights unless the experiment
    weights by samples.

    Confidence: paper and public code.

    >>> FedBN().hyper()
    {}
    """

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedBN"
    reference: ClassVar[str] = "Li et al., FedBN: Federated Learning on Non-IID Features, ICLR 2021, arXiv:2102.07623"
    costs: ClassVar[Costs] = Costs(client_state="1")
    needs_only_sums: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = True

    def init_client(self, w: Tensor) -> State:
        """The model with the client's scales and shifts, of which only those are ever used; whether there is one."""
        return {"own": w.clone(), "seen": w.new_zeros(())}

    def personal(self, task: Task, w: Tensor, state: State) -> Tensor:
        """The global model with the client's own scales and shifts."""
        return w + task.norm_mask(w) * self._offset(w, state)

    def objective(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> Tensor:
        """The loss of the client's own model: ``y`` starts at the global one and moves as the own one does."""
        return task.loss(y + task.norm_mask(y) * self._offset(ctx.w, ctx.state), batch)

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The update, and where scales and shifts have moved to."""
        own = y + self._offset(ctx.w, ctx.state)
        return {"delta": ctx.w - y}, {"own": own, "seen": torch.ones_like(ctx.state["seen"])}

    def _offset(self, w: Tensor, state: State) -> Tensor:
        return state["seen"] * (state["own"] - w)
