"""Your own method in one small file: FedAvg with server momentum. It runs in every engine as it stands.

    feddpc compare --methods fedavg,examples/own_method.py:FedAvgM --rounds 30

or ``python examples/own_method.py``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import feddpc
from feddpc.methods import Cohort, Method, State, Step


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """Remember the direction of travel on the server: m_t = beta m_{t-1} + mean_S D_j, w_t = w_{t-1} - eta_g m_t."""

    name: ClassVar[str] = "fedavgm"
    title: ClassVar[str] = "FedAvgM"
    reference: ClassVar[str] = "Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019"

    beta: float = 0.5

    def init_server(self, w: Tensor, population: int) -> State:
        """No direction yet."""
        return {"m": torch.zeros_like(w)}

    def aggregate(self, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """Clients send delta = w_{t-1} - w_j; dividing by the local rate gives the accumulated gradient D_j."""
        m = self.beta * server["m"] + cohort.mean(up["delta"]) / cohort.client_lr
        return Step(m, rate=cohort.server_lr, server={"m": m}, notes={"speed": m.norm()})


if __name__ == "__main__":
    for method in ("fedavg", FedAvgM(beta=0.5)):
        result = feddpc.simulate(method=method, rounds=30, engine="stacked")
        print(f"{result.config.method:8} best accuracy {result.best_accuracy:.1%}")
