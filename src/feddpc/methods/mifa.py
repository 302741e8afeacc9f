"""MIFA: the server averages the last update of every client, however old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class MIFA(Method):
    """Average the last update of every client, however old.

    SAG over clients, where FedVARP is SAGA: G_j is client j's last update, with weight 1/N fresh or stale.

    Client j:  plain local SGD, sends u_j = eta_l D_j
    Server:    G_j <- D_j for j in S
               w_t  = w_{t-1} - eta_g 1/N sum_all G_j

    | symbol | name  | default | domain      |
    |--------|-------|---------|-------------|
    |        | table | zero    | zero, wait  |

    table = "zero": the table starts from zeros, so round 1 is m/N times FedAvg's step. table = "wait": the model rests
    until every client has been seen once, and moves from the next round on. Full participation is FedAvg.

    Departures: table = "wait" fills the table as clients come (the authors' code lets all of them train in the round in
    which the last one appears), and a rate that decays does so while waiting too; constant rates by default (their
    code: eta_0 / t); the mean of the table is kept in float64.

    Confidence: paper through summaries; the authors' code read.

    >>> MIFA(table="wait").hyper()
    {'table': 'wait'}
    """

    name: ClassVar[str] = "mifa"
    title: ClassVar[str] = "MIFA"
    reference: ClassVar[str] = "Gu et al., Fast federated learning in the presence of unavailability, NeurIPS 2021"
    costs: ClassVar[Costs] = Costs(server_state="N+1", server_work="d per client")
    needs_only_sums: ClassVar[bool] = True

    table: Literal["zero", "wait"] = "zero"

    def init_server(self, w: Tensor, population: int) -> State:
        """The table's mean and, to wait, how many clients were seen."""
        mean = {"Gbar": torch.zeros_like(w, dtype=torch.float64)}
        return mean if self.table == "zero" else mean | {"seen": w.new_zeros((), dtype=torch.int64)}

    def init_slot(self, w: Tensor) -> State:
        """The last update of one client and, to wait, whether there was one."""
        row = {"G": torch.zeros_like(w)}
        return row if self.table == "zero" else row | {"seen": w.new_zeros((), dtype=torch.int64)}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Fresh updates replace old ones, then the whole table is averaged."""
        D_md, old = rows["delta"] / cohort.client_lr, cohort.slots
        Gbar = server["Gbar"] + cohort.total(D_md) - cohort.total(old["G"])
        if self.table == "zero":
            return Step(Gbar.to(w.dtype), cohort.server_lr, server={"Gbar": Gbar}, slots={"G": D_md})
        ready = server["seen"] == cohort.population
        seen = server["seen"] + cohort.across((1 - old["seen"]).sum())
        return Step(
            Gbar.to(w.dtype) * ready,
            cohort.server_lr,
            server={"Gbar": Gbar, "seen": seen},
            slots={"G": D_md, "seen": torch.ones_like(old["seen"])},
            notes={"clients_seen": seen},
        )
