"""FedDC: clients track how far they drifted, and are corrected for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedDC(Method):
    """Decouple and correct the clients' drift.

    Client j:  minimises F_j(y) + alpha/2 |y - (w_{t-1} - h_j)|^2 + <y, c - c_j> by K_j steps from w_{t-1}
               h_j <- h_j + (w_j - w_{t-1})                              its drift
               c_j <- c_j - c + u_j / (K_j eta_l)                        (form = "code": SCAFFOLD's option II)
               c_j <- u_j / (K_j eta_l)                                  (form = "paper")
               sends u_j = w_{t-1} - w_j (paper: less h_j) and the change of c_j
    Server:    w_t  = mean_S w_j + 1/N sum_all h_j                       (form = "code")
               w_t  = mean_S (w_j + h_j)                                 (form = "paper")
               c   <- c + 1/N sum_S (change of c_j)

    | symbol | name     | default | domain         |
    |--------|----------|---------|----------------|
    | alpha  | alpha    | 0.01    | alpha >= 0     |
    |        | form     | code    | code, paper    |
    |        | evaluate | model   | model, clients |

    With all c frozen at zero the code's form is FedDyn. With full participation it reaches the true optimum, the
    paper's does not. evaluate = "clients" looks at the mean of all clients' last models, one of three that the code
    logs.

    Departures: the default is the code's form; this round's rate and the client's own K_j (the code: the undecayed rate
    and a common count); uniform alpha (the code divides alpha, and multiplies c and its change, by the client's
    relative share of the data); no clipping (the code: 10) and no weight decay unless asked for (the code: 1e-3);
    momentum, Adam and clipping at the clients are refused, as c_j would be no mean of gradients; eta_g scales the whole
    step and is neutral when the rates are tied; sums over all clients are kept in float64.

    Confidence: the equations through an excerpt; the authors' code read.

    >>> FedDC(form="paper").alpha
    0.01
    """

    name: ClassVar[str] = "feddc"
    title: ClassVar[str] = "FedDC"
    reference: ClassVar[str] = "Gao et al., FedDC, CVPR 2022, arXiv:2203.11751"
    privacy: ClassVar[str] = (
        "The update and the change of the control variate leave a client; the latter follows from the update and the "
        "number of local steps."
    )
    costs: ClassVar[Costs] = Costs(
        down="2", up="2", client_state="2", server_state="2 / 1", client_work="3d per step", server_work="2d per client"
    )
    needs_only_sums: ClassVar[bool] = True

    alpha: float = 0.01
    form: Literal["code", "paper"] = "code"
    evaluate: Literal["model", "clients"] = "model"

    def __post_init__(self) -> None:
        self.require(self.alpha >= 0, "alpha", "alpha >= 0")

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """The variate is u_j / (K_j eta_l), a mean of gradients only if steps follow whole gradients.

        With weight decay it is that of the decayed objective, as it should be.
        """
        return "momentum", "adam", "clip_norm"

    def init_server(self, w: Tensor, population: int) -> State:
        """Means over ALL clients: of the variates, and in the code's form of the drifts."""
        zero = torch.zeros_like(w, dtype=torch.float64)
        drift = {"h": zero} if self.form == "code" else {}
        return {"c": zero} | drift | ({"mean": w.double()} if self.evaluate == "clients" else {})

    def init_slot(self, w: Tensor) -> State:
        """A client's last model, if it is evaluated; before the first it is the initial one."""
        return {"last": w.clone()} if self.evaluate == "clients" else {}

    def init_client(self, w: Tensor) -> State:
        """Drift and variate."""
        return {"h": torch.zeros_like(w), "c": torch.zeros_like(w)}

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """The mean variate."""
        return {"c": server["c"].to(w.dtype)}

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """The gradient of the three terms."""
        return g + self.alpha * (y - ctx.w + ctx.state["h"]) + ctx.broadcast["c"] - ctx.state["c"]

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The update and the change of the variate; drift and variate are kept."""
        delta, old = ctx.w - y, ctx.state["c"]
        h, c = ctx.state["h"] - delta, delta / (ctx.steps * ctx.lr)
        if self.form == "code":
            c = c + old - ctx.broadcast["c"]
        up = {"delta": delta if self.form == "code" else delta - h, "change": c - old}
        if self.evaluate == "clients" and self.form == "paper":
            up["last"] = y
        return up, {"h": h, "c": c}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Paper: the plain mean of what was sent. Code: corrected by the mean drift of ALL clients."""
        delta_md = rows["delta"]
        update = cohort.mean(delta_md)
        new = {"c": server["c"] + cohort.total(rows["change"])}
        if self.form == "code":
            new["h"] = server["h"] - cohort.total(delta_md)
            update = update - new["h"].to(w.dtype)
        slots: State = {}
        if self.evaluate == "clients":
            slots = {"last": w - delta_md if self.form == "code" else rows["last"]}
            new["mean"] = server["mean"] + cohort.total(slots["last"]) - cohort.total(cohort.slots["last"])
        return Step(update, cohort.server_lr / cohort.client_lr, server=new, slots=slots)

    def evaluated(self, w: Tensor, server: State) -> Tensor:
        """The model, or the mean of all clients' last models."""
        return w if self.evaluate == "model" else server["mean"].to(w.dtype)
