"""FedAMD: some participants measure the gradient exactly, the others follow it with corrected steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from feddpc.methods._algebra import safe_ratio
from feddpc.methods.base import ClientContext, Cohort, Costs, Mask, Method, State, Step, Transformed
from feddpc.tasks.base import Batch, BatchIndices, Task


@dataclass(frozen=True, kw_only=True)
class FedAMD(Method):
    """Divide participants into anchors, who measure gradients, and miners, who descend.

    Anchor j:  V_j = grad F_j(w_{t-1}) on all its data; sends the change of V_j, makes no step
    Miner j:   q_0 = Vbar;  q_k = q_{k-1} - grad(x_{k-1}; B_k) + grad(x_k; B_k), both on batch B_k
               x_{k+1} = x_k - eta_l q_k from x_0 = w_{t-1};  sends u_j = w_{t-1} - x_K
    Server:    w_t  = w_{t-1} - (eta_g/eta_l) mean over the miners of u_j       (unchanged without miners)
               Vbar = 1/N sum_all V_j, with new V_j from the next round on
               before round 1 ALL N clients compute V_j at w_0

    | symbol | name    | default  | domain               |
    |--------|---------|----------|----------------------|
    | p      | p       | 0.2      | 0 <= p <= 1          |
    |        | anchors | constant | constant, sequential |
    |        | every   | 5        | every >= 2           |

    anchors = "constant": every participant is an anchor with probability p. "sequential": in rounds 1, 1 + every,
    1 + 2 every, ... all participants are anchors, in the others all are miners. p = 1: the model never moves. One
    local step: every miner returns eta_l Vbar.

    Departures: p is a constant; the authors' code also computes it from the cohort and the population,
    sqrt(4 r^2 + 2 r) - 2 r with r = N / m, or (2 / (m + 2))^(1/m), which can be given as numbers here. The anchors'
    batch is all their data; clients keep V_j and send differences, so that the server holds d and not N d. That
    everybody takes part before round 1 is the authors' assumption, and an advantage over methods that meet clients one
    by one.

    Confidence: the algorithm box through a summary; the authors' code read (its logic, the scripts do not fit it).

    >>> FedAMD().surveys
    True
    """

    name: ClassVar[str] = "fedamd"
    title: ClassVar[str] = "FedAMD"
    reference: ClassVar[str] = "Wu et al., Anchor sampling for federated learning, ICML 2023, arXiv:2206.05891"
    privacy: ClassVar[str] = (
        "Every client sends an exact gradient of all its data before round 1, and its change whenever it is an anchor. "
        "A gradient tells more about few samples than an update does."
    )
    costs: ClassVar[Costs] = Costs(
        down="2",
        client_state="1",
        server_state="1",
        client_work="a second gradient per step, or one pass; all clients one pass before round 1",
        server_work="d per client",
    )
    needs_only_sums: ClassVar[bool] = True

    p: float = 0.2
    anchors: Literal["constant", "sequential"] = "constant"
    every: int = 5

    def __post_init__(self) -> None:
        self.require(0 <= self.p <= 1, "p", "0 <= p <= 1")
        self.require(self.every >= 2, "every", "every >= 2 (at 1 the model would never move)")

    @property
    def probes(self) -> bool:
        """Anchors look at all their data."""
        return True

    @property
    def reports(self) -> bool:
        """Only the change is sent, with the update."""
        return False

    @property
    def surveys(self) -> bool:
        """Everybody measures the gradient at the initial model."""
        return True

    def train_mask(self, cohort: Cohort) -> Mask:
        """Miners train."""
        if self.anchors == "sequential":
            return np.full(len(cohort.clients), (cohort.round - 1) % self.every != 0)
        return cohort.uniforms("anchors") >= self.p

    def probe_mask(self, cohort: Cohort) -> Mask:
        """Anchors, that is all who do not train."""
        return ~self.train_mask(cohort)

    def init_server(self, w: Tensor, population: int) -> State:
        """The mean of all V_j."""
        return {"Vbar": torch.zeros_like(w, dtype=torch.float64)}

    def init_client(self, w: Tensor) -> State:
        """The client's last exact gradient."""
        return {"V": torch.zeros_like(w)}

    def probe(self, task: Task, w: Tensor, data: Iterable[BatchIndices]) -> State:
        """The gradient of all the client's data."""
        return {"g": task.full_gradient(w, data)}

    def default_probe(self, w: Tensor) -> State:
        """Miners measure nothing."""
        return {"g": torch.zeros_like(w)}

    def client_state_from_probe(self, answers: State) -> State:
        """V_j at the initial model."""
        return {"V": answers["g"]}

    def server_state_from_probe(self, server: State, mean: State) -> State:
        """Their mean."""
        return {"Vbar": mean["g"]}

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """The direction that miners start from."""
        return {"Vbar": server["Vbar"].to(w.dtype)}

    def start(self, ctx: ClientContext) -> Tensor:
        """The local model, the one before it, and the direction: x_k, x_{k-1}, q_{k-1}."""
        return torch.stack([ctx.w, ctx.w, ctx.broadcast["Vbar"]])

    def step(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """Two gradients on one batch; in the first step they cancel."""
        x, before, q = y
        _, old = task.value_and_grad(lambda at: task.loss(at, batch), before)
        value, new = task.value_and_grad(lambda at: task.loss(at, batch), x)
        q = q - old + new
        return torch.stack([x - ctx.lr * q, x, q]), value

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """Miners send an update, anchors the change of their gradient."""
        miner, V = ctx.steps > 0, ctx.state["V"]
        sent = torch.where(miner, ctx.w - y[0], ctx.state["g"] - V)
        return {"sent": sent}, {"V": torch.where(miner, V, ctx.state["g"])}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """The miners' mean update; the anchors' changes are for the next round."""
        miner, miners = cohort.steps > 0, cohort.whole.steps > 0
        share = safe_ratio(cohort.weights * miner, (cohort.whole.weights * miners).sum())
        update = cohort.weighted_sum(share, rows["sent"])
        Vbar = server["Vbar"] + cohort.total(rows["sent"] * ~miner[:, None])
        return Step(update, cohort.server_lr / cohort.client_lr, server={"Vbar": Vbar}, notes={"miners": miners.sum()})
