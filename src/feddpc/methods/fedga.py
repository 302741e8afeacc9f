"""FedGA: clients start from a point displaced along their own excess gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed
from feddpc.tasks.base import BatchIndices, Task


@dataclass(frozen=True, kw_only=True)
class FedGA(Method):
    """Start clients along their own excess gradient.

    Descent from such displaced starts also lowers the variance of the clients' gradients.

    variant = "fresh" (the authors'): two exchanges a round. Server and client:

        g_j  = grad F_j(w_{t-1}) on all data of client j, sent before training
        gbar = mean_S g_j over this round's participants
        y   <- w_{t-1} + beta (g_j - gbar);  K local steps;  sends u_j = w_{t-1} - y
        w_t  = w_{t-1} - eta_g mean_S D_j                    (the displacements cancel in the mean)

    variant = "stale" (what the FedDPC paper's cost table implies): no extra exchange

        h_j  = D_j / K_j of the client's last participation, hbar = mean of h over the last round's participants
        y   <- w_{t-1} + beta (h_j - hbar), displacement 0 at a first participation
        D_j  is measured from the displaced start; server as FedAvg

    | symbol | name    | default | domain        |
    |--------|---------|---------|---------------|
    | beta   | beta    | 0.1     | beta >= 0     |
    |        | variant | stale   | fresh, stale  |

    beta = 0 is FedAvg. Costs are given for stale / fresh.

    Departures: the default is the stale variant, because the FedDPC paper charges FedGA no second gradient pass and
    times it like the others; the authors' own algorithm is ``fresh``. ``beta`` is constant: with a decaying rate the
    authors' code multiplies it by the same decay.

    Confidence: fresh, the authors' code; stale, a reconstruction from the FedDPC paper's text and Table 1.

    >>> FedGA(variant="fresh").probes
    True
    """

    name: ClassVar[str] = "fedga"
    title: ClassVar[str] = "FedGA"
    reference: ClassVar[str] = "Dandi, Barba, Jaggi, Implicit Gradient Alignment, AAAI 2022, arXiv:2106.13897"
    privacy: ClassVar[str] = (
        "stale: nothing but the update leaves a client. fresh: also an exact gradient of all its data, every round."
    )
    costs: ClassVar[Costs] = Costs(
        down="2",
        up="1 / 2",
        client_state="1 / 0",
        server_state="1 / 0",
        client_work="2d / a full gradient pass",
        server_work="mean gradient",
    )
    needs_only_sums: ClassVar[bool] = True

    beta: float = 0.1
    variant: Literal["fresh", "stale"] = "stale"

    def __post_init__(self) -> None:
        self.require(self.beta >= 0, "beta", "beta >= 0")

    @property
    def probes(self) -> bool:
        """Fresh gradients need an exchange of their own."""
        return self.variant == "fresh"

    def init_server(self, w: Tensor, population: int) -> State:
        """Stale: the mean gradient of the last round's participants."""
        return {} if self.probes else {"hbar": torch.zeros_like(w)}

    def init_client(self, w: Tensor) -> State:
        """Stale: the mean gradient of the last participation, and whether there was one."""
        return {} if self.probes else {"h": torch.zeros_like(w), "seen": w.new_zeros(())}

    def probe(self, task: Task, w: Tensor, data: Iterable[BatchIndices]) -> State:
        """Fresh: the gradient of all the client's data at the global model."""
        return {"g": task.full_gradient(w, data)}

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """The mean gradient that clients compare theirs with."""
        return {"gbar": cohort.mean(probed["g"])} if self.probes else {"gbar": server["hbar"]}

    def start(self, ctx: ClientContext) -> Tensor:
        """Move along the client's own excess gradient: ascent, on purpose."""
        if self.probes:
            return ctx.w + self.beta * (ctx.state["g"] - ctx.broadcast["gbar"])
        return ctx.w + self.beta * ctx.state["seen"] * (ctx.state["h"] - ctx.broadcast["gbar"])

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """Stale displacements do not cancel in the mean, so there the update is measured from the displaced start."""
        if self.probes:
            return {"delta": ctx.w - y}, {}
        delta = self.start(ctx) - y
        return {"delta": delta}, {"h": delta / (ctx.lr * ctx.steps), "seen": torch.ones_like(ctx.state["seen"])}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """FedAvg, and the mean of this round's gradients for the next."""
        step = super().combine(w, server, rows, cohort)
        if self.probes:
            return step
        per_step = cohort.weights / (cohort.client_lr * cohort.steps)
        return replace(step, server={"hbar": cohort.weighted_sum(per_step, rows["delta"])})
