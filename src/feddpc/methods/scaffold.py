"""SCAFFOLD: control variates turn every local step towards the global gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step, Transformed
from feddpc.tasks.base import BatchIndices, Task


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Correct every local step by the difference of two control variates.

    Client j:  y   <- y - eta_l (grad F_j(y) - c_j + c)                      (K_j steps from w_{t-1})
               c_j+ = grad F_j(w_{t-1}) on all its data                      (option I)
               c_j+ = c_j - c + u_j / (K_j eta_l)                            (option II)
               sends u_j = w_{t-1} - y and c_j+ - c_j, keeps c_j+
    Server:    w_t  = w_{t-1} - eta_g mean_S D_j
               c   <- c + 1/N sum_S (c_j+ - c_j)                             (so c = mean of all c_j, always)

    For plain SGD, option II is the mean of the raw gradients along the local path. All variates are zero at the start,
    so a client seen for the first time is pushed by c alone; with warm = true all clients first send
    c_j = grad F_j(w_0).

    | symbol | name   | default | domain     |
    |--------|--------|---------|------------|
    |        | option | II      | I, II      |
    |        | warm   | false   | true, false |

    Departures: c is kept in float64, so that it drifts from the mean of the c_j only by the rounding of what is sent;
    u_j is divided by the rate of this round and by the client's own K_j (public codes take an undecayed rate, or one
    client's count for all, and scale c by the client's relative share of the data). Option II refuses
    momentum, Adam and clipping at the clients, with which its c_j would be no mean of gradients.

    Confidence: the paper through summaries; third-party codes read; every relation in closed form is a test.

    >>> Scaffold(option="I").probes, Scaffold().probes
    (True, False)
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    reference: ClassVar[str] = "Karimireddy et al., SCAFFOLD, ICML 2020, arXiv:1910.06378"
    privacy: ClassVar[str] = (
        "Option II: the update leaves a client, and the change of its variate, which follows from the update and the "
        "number of local steps. Option I: also an exact gradient of all its data. warm: every client sends such a "
        "gradient before round 1."
    )
    costs: ClassVar[Costs] = Costs(
        down="2", up="2", client_state="1", server_state="1", client_work="d per step", server_work="d per client"
    )
    needs_only_sums: ClassVar[bool] = True

    option: Literal["I", "II"] = "II"
    warm: bool = False

    @property
    def probes(self) -> bool:
        """Option I looks at all the client's data; the answer stays with the client."""
        return self.option == "I"

    @property
    def reports(self) -> bool:
        """The variate's change is sent after training."""
        return False

    @property
    def surveys(self) -> bool:
        """A warm start asks all clients once."""
        return self.warm

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """Option II divides u_j by K_j eta_l, a mean of gradients only if steps follow whole gradients.

        With weight decay it is that of the decayed objective, as it should be.
        """
        return () if self.probes else ("momentum", "adam", "clip_norm")

    def init_server(self, w: Tensor, population: int) -> State:
        """The mean of all control variates."""
        return {"c": torch.zeros_like(w, dtype=torch.float64)}

    def init_client(self, w: Tensor) -> State:
        """The client's control variate."""
        return {"c": torch.zeros_like(w)}

    def probe(self, task: Task, w: Tensor, data: Iterable[BatchIndices]) -> State:
        """The gradient of all the client's data at the global model."""
        return {"g": task.full_gradient(w, data)}

    def client_state_from_probe(self, answers: State) -> State:
        """Warm start: the first variate is a gradient."""
        return {"c": answers["g"]}

    def server_state_from_probe(self, server: State, mean: State) -> State:
        """Warm start: and c is their mean."""
        return {"c": mean["g"]}

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """The server's variate."""
        return {"c": server["c"].to(w.dtype)}

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """The client's own direction out, the global one in."""
        return g - ctx.state["c"] + ctx.broadcast["c"]

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The update, and how the variate changed."""
        delta, old = ctx.w - y, ctx.state["c"]
        new = ctx.state["g"] if self.probes else old - ctx.broadcast["c"] + delta / (ctx.steps * ctx.lr)
        return {"delta": delta, "change": new - old}, {"c": new}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """FedAvg, and the variate's mean over ALL clients."""
        c = server["c"] + cohort.total(rows["change"])
        return replace(super().combine(w, server, rows, cohort), server={"c": c})
