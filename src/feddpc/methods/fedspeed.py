"""FedSpeed: FedDyn's proximal correction, and gradients taken at a point uphill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods._algebra import safe_ratio
from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed
from feddpc.tasks.base import Batch, Task


@dataclass(frozen=True, kw_only=True)
class FedSpeed(Method):
    """Correct the proximal term, and take gradients at a point uphill.

    Client j, each step on one batch:
               g1 = grad F_j(y);  g2 = grad F_j(y + rho g1 / |g1|);  g = (1 - alpha) g1 + alpha g2
               y <- y - eta_l (g - q_j + (y - w_{t-1}) / lam)
               then q_j <- q_j - (w_j - w_{t-1}) / lam
    Server:    w_t = mean_S w_j - lam/N sum_all q_j                  (server = "code": FedDyn's)
               w_t = mean_S (w_j - lam q_j)                          (server = "paper": participants only)

    Kept here is p_j = -lam q_j, the sum of the client's moves.

    | symbol | name   | default | domain             |
    |--------|--------|---------|--------------------|
    | lam    | lam    | 10      | lam > 0            |
    | rho    | rho    | 0.1     | rho >= 0           |
    | alpha  | alpha  | 1       | 0 <= alpha <= 1    |
    |        | server | code    | code, paper        |

    alpha = 0 or rho = 0 with the code's server is FedDyn with alpha = 1 / lam. Both servers agree under full
    participation.

    Departures: the default is the code's server, because the paper's adds a participant's whole history to the model
    and oscillates; no clipping and no weight decay unless asked for (the code: 10 and 1e-3, and the proximal term comes
    in after clipping, while ``clip_norm`` is for the whole direction; momentum and Adam are refused); the perturbation
    is normalised, as in the code, without its 1e-7 (0 where the gradient is 0); eta_g scales the whole step and is
    neutral when the rates are tied.

    Confidence: the algorithm box through a summary; the authors' code read.

    >>> FedSpeed().hyper()
    {'lam': 10.0, 'rho': 0.1, 'alpha': 1.0, 'server': 'code'}
    """

    name: ClassVar[str] = "fedspeed"
    title: ClassVar[str] = "FedSpeed"
    reference: ClassVar[str] = "Sun et al., FedSpeed, ICLR 2023, arXiv:2302.10429"
    costs: ClassVar[Costs] = Costs(
        client_state="1", server_state="1 / 0", client_work="a second gradient per step", server_work="d per client"
    )
    needs_only_sums: ClassVar[bool] = True

    lam: float = 10.0
    rho: float = 0.1
    alpha: float = 1.0
    server: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        self.require(self.lam > 0, "lam", "lam > 0")
        self.require(self.rho >= 0, "rho", "rho >= 0")
        self.require(0 <= self.alpha <= 1, "alpha", "0 <= alpha <= 1")

    def init_server(self, w: Tensor, population: int) -> State:
        """Code: the mean over ALL clients of their moves."""
        return {"P": torch.zeros_like(w, dtype=torch.float64)} if self.server == "code" else {}

    def init_client(self, w: Tensor) -> State:
        """The sum of the client's moves."""
        return {"p": torch.zeros_like(w)}

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """As FedDyn, which it is at alpha = 0."""
        return "momentum", "adam"

    def local_direction(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """Two gradients on one batch."""
        value, g = task.value_and_grad(lambda at: task.loss(at, batch), y)
        if self.alpha > 0 and self.rho > 0:
            uphill = y + self.rho * _unit(g)
            _, g2 = task.value_and_grad(lambda at: task.loss(at, batch), uphill)
            g = (1 - self.alpha) * g + self.alpha * g2
        return g + (ctx.state["p"] + (y - ctx.w)) / self.lam, value

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The update (paper: from the model moved by all the client's moves); the client adds up its moves."""
        delta = ctx.w - y
        p = ctx.state["p"] - delta
        return {"delta": delta if self.server == "code" else delta - p}, {"p": p}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Paper: the plain mean. Code: corrected by the mean over ALL clients."""
        rate = cohort.server_lr / cohort.client_lr
        if self.server == "paper":
            return Step(cohort.mean(rows["delta"]), rate)
        P = server["P"] - cohort.total(rows["delta"])
        return Step(cohort.mean(rows["delta"]) - P.to(w.dtype), rate, server={"P": P})


def _unit(g: Tensor) -> Tensor:
    """Return ``g`` over its norm, and 0 for 0."""
    return safe_ratio(g, torch.linalg.vector_norm(g))
