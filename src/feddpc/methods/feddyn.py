"""FedDyn: a linear and a quadratic term make the clients' stationary points agree with the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Regularise clients dynamically, so that their optima agree with the global one.

    Client j:  minimises F_j(y) - <l_j, y> + alpha/2 |y - w_{t-1}|^2 by K_j steps from w_{t-1}
               l_j <- l_j - alpha (w_j - w_{t-1});  sends u_j = w_{t-1} - w_j
    Server:    h   <- h + alpha/N sum_S u_j
               w_t  = mean_S w_j - h / alpha

    In the code and here the sums h_j = -l_j / alpha of a client's moves are kept instead, and with
    H = 1/N sum_all h_j the server's step is  w_t = w_{t-1} - (eta_g/eta_l) (mean_S u_j - H).

    | symbol | name     | default | domain          |
    |--------|----------|---------|-----------------|
    | alpha  | alpha    | 0.1     | alpha > 0       |
    |        | evaluate | model   | model, clients  |

    alpha -> 0 is NOT FedAvg: round 1 is (1 + m/N) times its step. evaluate = "clients" looks at the mean of all
    clients' last models, as the authors' curves do (the server then keeps those, N d more).

    Departures: uniform alpha, by default 0.1 as in FL-Simulator (the authors' examples: 0.01, divided by the client's
    relative share of the data); no clipping and no weight decay unless asked for (the code: ``clip_norm = 10``, weight
    decay 1e-3; either only changes how the local problem is solved; momentum and Adam are refused); eta_g, which is not
    in the paper, scales the whole step and is neutral when the rates are tied; H is kept in float64.

    Confidence: paper through summaries; the authors' code read.

    >>> FedDyn(alpha=0.01).hyper()
    {'alpha': 0.01, 'evaluate': 'model'}
    """

    name: ClassVar[str] = "feddyn"
    title: ClassVar[str] = "FedDyn"
    reference: ClassVar[str] = "Acar et al., Federated learning based on dynamic regularization, ICLR 2021"
    costs: ClassVar[Costs] = Costs(
        client_state="1", server_state="1", client_work="3d per step", server_work="d per client"
    )
    needs_only_sums: ClassVar[bool] = True

    alpha: float = 0.1
    evaluate: Literal["model", "clients"] = "model"

    def __post_init__(self) -> None:
        self.require(self.alpha > 0, "alpha", "alpha > 0 (at 0 the server's correction h / alpha does not exist)")

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """What a client moved stands for the gradient where it ends, which the rule takes from plain steps."""
        return "momentum", "adam"

    def init_server(self, w: Tensor, population: int) -> State:
        """The mean over ALL clients of their moves, and of their models if these are evaluated."""
        zero = torch.zeros_like(w, dtype=torch.float64)
        return {"H": zero} if self.evaluate == "model" else {"H": zero, "mean": w.double()}

    def init_slot(self, w: Tensor) -> State:
        """A client's last model, if it is evaluated; before the first it is the initial one."""
        return {} if self.evaluate == "model" else {"last": w.clone()}

    def init_client(self, w: Tensor) -> State:
        """The sum of the client's moves."""
        return {"h": torch.zeros_like(w)}

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """The gradient of the regularised objective."""
        return g + self.alpha * (ctx.state["h"] + (y - ctx.w))

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The update; the client adds up its moves."""
        delta = ctx.w - y
        return {"delta": delta}, {"h": ctx.state["h"] - delta}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """The participants' mean, corrected by the mean over ALL clients."""
        delta_md = rows["delta"]
        H = server["H"] - cohort.total(delta_md)
        update = cohort.mean(delta_md) - H.to(w.dtype)
        rate = cohort.server_lr / cohort.client_lr
        if self.evaluate == "model":
            return Step(update, rate, server={"H": H})
        last_md = w - delta_md
        mean = server["mean"] + cohort.total(last_md) - cohort.total(cohort.slots["last"])
        return Step(update, rate, server={"H": H, "mean": mean}, slots={"last": last_md})

    def evaluated(self, w: Tensor, server: State) -> Tensor:
        """The model, or the mean of all clients' last models."""
        return w if self.evaluate == "model" else server["mean"].to(w.dtype)
