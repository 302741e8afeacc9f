"""Your own method in one small file: FedAvg with bounded steps. It runs in every engine as it stands.

    feddpc compare --methods fedavg,examples/own_method.py:ShortSteps --rounds 30

or ``python examples/own_method.py``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import feddpc
from feddpc.methods import Cohort, Method, State, Step


@dataclass(frozen=True, kw_only=True)
class ShortSteps(Method):
    """Shorten steps that are longer than ``times`` the mean length so far: w_t = w_{t-1} - eta_g s mean_S D_j."""

    name: ClassVar[str] = "shortsteps"
    title: ClassVar[str] = "Short steps"

    times: float = 1.0

    def init_server(self, w: Tensor, population: int) -> State:
        """How many steps there were, and how long they were in all."""
        return {"count": w.new_zeros(()), "total": w.new_zeros(())}

    def aggregate(self, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """Clients send delta = w_{t-1} - w_j; dividing by the local rate gives the accumulated gradient D_j."""
        D = cohort.mean(up["delta"]) / cohort.client_lr
        count, total = server["count"] + 1, server["total"] + D.norm()
        s = torch.clamp(self.times * total / count / D.norm(), max=1.0)
        return Step(s * D, rate=cohort.server_lr, server={"count": count, "total": total}, notes={"shortened": s})


if __name__ == "__main__":
    for method in ("fedavg", ShortSteps(times=1.0)):
        result = feddpc.simulate(method=method, rounds=30, engine="stacked")
        print(f"{result.config.method:10} best accuracy {result.best_accuracy:.1%}")
