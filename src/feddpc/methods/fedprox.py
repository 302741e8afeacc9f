"""FedProx: local training that is pulled back to the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from feddpc.methods.base import ClientContext, Costs, Method


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """Pull local training back to the global model.

    Clients minimise F_j(y) + mu/2 |y - w_{t-1}|^2:

    Client j:  y <- y - eta_l [ grad F_j(y; batch) + mu (y - w_{t-1}) ]
    Server:    as FedAvg

    | symbol | name | default | domain  |
    |--------|------|---------|---------|
    | mu     | mu   | 0.01    | mu >= 0 |

    mu = 0 is FedAvg. The first local step never differs from FedAvg's, so with one step per client (K = 1) the two
    agree. Stable for eta_l (L + mu) < 2.

    Departures: uniform sampling and averaging, and no reduced work for slow clients, as in the FedDPC paper.

    Confidence: paper and the authors' code.

    >>> FedProx(mu=0.1).hyper()
    {'mu': 0.1}
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    reference: ClassVar[str] = (
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127"
    )
    costs: ClassVar[Costs] = Costs(client_work="2d per step")
    needs_only_sums: ClassVar[bool] = True

    mu: float = 0.01

    def __post_init__(self) -> None:
        self.require(self.mu >= 0, "mu", "mu >= 0")

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """Add the pull of the proximal term to the gradient."""
        return g + self.mu * (y - ctx.w)
