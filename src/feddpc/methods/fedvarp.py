"""FedVARP: the server stands in for absent clients with their last updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedVARP(Method):
    """Let remembered updates stand in for absent clients.

    SAGA over clients: y_j is client j's last update, ybar their mean over the whole population.

    Client j:  plain local SGD, sends u_j = eta_l D_j
    Server:    v    = ybar + mean_S (D_j - y_j)
               w_t  = w_{t-1} - eta_g v
               ybar <- ybar + 1/N sum_S (D_j - y_j);   y_j <- D_j for j in S          (y_j = 0 at the start)

    No hyper-parameters. Round 1 and full participation are FedAvg. Unbiased for uniform sampling only.

    Departures: the paper divides an update by its number of local steps too, D_j / tau, which is the same rule with
    another server rate where all clients make tau steps. Memories are in gradient units (D, not u), so that a decayed
    rate does not misscale old entries; ybar is kept in float64, so that it does not drift from the mean of the table.

    Confidence: paper (through summaries) and two third-party codes.

    >>> FedVARP().hyper()
    {}
    """

    name: ClassVar[str] = "fedvarp"
    title: ClassVar[str] = "FedVARP"
    reference: ClassVar[str] = "Jhunjhunwala et al., FedVARP, UAI 2022, arXiv:2207.14130"
    costs: ClassVar[Costs] = Costs(server_state="N+1", server_work="2d per client")
    needs_only_sums: ClassVar[bool] = True

    def init_server(self, w: Tensor, population: int) -> State:
        """The mean of all memories."""
        return {"ybar": torch.zeros_like(w, dtype=torch.float64)}

    def init_slot(self, w: Tensor) -> State:
        """The memory of one client."""
        return {"y": torch.zeros_like(w)}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Fresh updates for those who came, remembered ones for the others."""
        D_md, y_md, ybar = rows["delta"] / cohort.client_lr, cohort.slots["y"], server["ybar"]
        v = ybar.to(w.dtype) + cohort.mean(D_md - y_md)
        ybar = ybar + cohort.total(D_md) - cohort.total(y_md)
        return Step(v, rate=cohort.server_lr, server={"ybar": ybar}, slots={"y": D_md})
