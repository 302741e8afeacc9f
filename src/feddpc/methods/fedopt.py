"""FedAvg with optimizers at the server: momentum, Adam, Yogi, Adagrad."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed
from feddpc.optimizers import ServerAdagrad, ServerAdam, ServerMomentum, ServerOptimizer, ServerYogi

_REDDI = "Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295"


class FedOpt(Method, ABC):
    """FedAvg, whose mean goes through a server optimizer."""

    needs_only_sums: ClassVar[bool] = True

    @property
    @abstractmethod
    def optimizer(self) -> ServerOptimizer:
        """The server's rule."""

    def init_server(self, w: Tensor, population: int) -> State:
        """The state of the optimizer."""
        return self.optimizer.initial(w)

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """FedAvg's step, through the optimizer."""
        step, state = super().combine(w, server, rows, cohort).optimized(self.optimizer, server, cohort)
        return replace(step, server=state)


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedOpt):
    """Remember the direction of travel on the server.

    Client j:  as FedAvg
    Server:    m_t = beta m_{t-1} + mean_S D_j                       (m_0 = 0)
               w_t = w_{t-1} - eta_g m_t

    | symbol | name     | default | domain            |
    |--------|----------|---------|-------------------|
    | beta   | momentum | 0.9     | 0 <= momentum < 1 |

    momentum = 0 is FedAvg. ``server_optimizer = "momentum"`` gives any other method the same rule. A round without
    uploads leaves m as it is.

    Departures: the paper writes m in units of the model, eta_l m_t, which is the same while eta_l is.

    Confidence: the paper's equation; golden values from 50 digits.

    >>> FedAvgM().hyper()
    {'momentum': 0.9}
    """

    name: ClassVar[str] = "fedavgm"
    title: ClassVar[str] = "FedAvgM"
    reference: ClassVar[str] = (
        "Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019, arXiv:1909.06335"
    )
    costs: ClassVar[Costs] = Costs(server_state="1", server_work="d")

    momentum: float = 0.9

    def __post_init__(self) -> None:
        self.require(0 <= self.momentum < 1, "momentum", "0 <= momentum < 1")

    @property
    def optimizer(self) -> ServerOptimizer:
        """Momentum."""
        return ServerMomentum(beta=self.momentum)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    """Scale every coordinate of the server's step by what it has moved so far.

    Client j:  as FedAvg
    Server:    x_t = mean_S u_j                                      (u_j = w_{t-1} - w_j)
               m_t = b1 m_{t-1} + (1 - b1) x_t                       (m_0 = 0)
               v_t = v_{t-1} + x_t^2                                 (v_0 = tau^2)
               w_t = w_{t-1} - eta_g m_t / (sqrt(v_t) + tau)

    | symbol | name | default | domain      |
    |--------|------|---------|-------------|
    | beta_1 | b1   | 0.9     | 0 <= b1 < 1 |
    | tau    | tau  | 0.001   | tau > 0     |

    eta_g is 0.01 unless set: a coordinate moves by about that per round, whatever eta_l is. ``server_optimizer =
    "adagrad"`` gives any other method the same rule.

    Departures: b1 is 0.9, as for the other two of the paper (its experiments with Adagrad: 0).

    Confidence: the paper's Algorithm 2; golden values from 50 digits.

    >>> FedAdagrad().hyper()
    {'b1': 0.9, 'tau': 0.001}
    """

    name: ClassVar[str] = "fedadagrad"
    title: ClassVar[str] = "FedAdagrad"
    reference: ClassVar[str] = _REDDI
    costs: ClassVar[Costs] = Costs(server_state="2", server_work="7d")
    usual_server_lr: ClassVar[float | None] = ServerAdagrad.server_lr

    b1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        self.require(0 <= self.b1 < 1, "b1", "0 <= b1 < 1")
        self.require(self.tau > 0, "tau", "tau > 0")

    @property
    def optimizer(self) -> ServerOptimizer:
        """Adagrad."""
        return ServerAdagrad(b1=self.b1, tau=self.tau)


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAdagrad):
    """Scale every coordinate of the server's step by a mean of its squares.

    Client j:  as FedAvg
    Server:    x_t = mean_S u_j                                      (u_j = w_{t-1} - w_j)
               m_t = b1 m_{t-1} + (1 - b1) x_t                       (m_0 = 0)
               v_t = b2 v_{t-1} + (1 - b2) x_t^2                     (v_0 = tau^2)
               w_t = w_{t-1} - eta_g m_t / (sqrt(v_t) + tau)

    | symbol | name | default | domain      |
    |--------|------|---------|-------------|
    | beta_1 | b1   | 0.9     | 0 <= b1 < 1 |
    | beta_2 | b2   | 0.99    | 0 <= b2 < 1 |
    | tau    | tau  | 0.001   | tau > 0     |

    There is no correction of bias, as in the paper. eta_g is 0.01 unless set: a coordinate moves by about that per
    round, whatever eta_l is. ``server_optimizer = "adam"`` gives any other method the same rule.

    Departures: none known.

    Confidence: the paper's Algorithm 2; golden values from 50 digits.

    >>> FedAdam().hyper()
    {'b1': 0.9, 'tau': 0.001, 'b2': 0.99}
    """

    name: ClassVar[str] = "fedadam"
    title: ClassVar[str] = "FedAdam"

    b2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.b2 < 1, "b2", "0 <= b2 < 1")

    @property
    def optimizer(self) -> ServerOptimizer:
        """Adam."""
        return ServerAdam(b1=self.b1, b2=self.b2, tau=self.tau)


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """Scale every coordinate of the server's step by squares that grow fast and are forgotten slowly.

    Client j:  as FedAvg
    Server:    x_t = mean_S u_j                                      (u_j = w_{t-1} - w_j)
               m_t = b1 m_{t-1} + (1 - b1) x_t                       (m_0 = 0)
               v_t = v_{t-1} - (1 - b2) x_t^2 sign(v_{t-1} - x_t^2)  (v_0 = tau^2)
               w_t = w_{t-1} - eta_g m_t / (sqrt(v_t) + tau)

    | symbol | name | default | domain      |
    |--------|------|---------|-------------|
    | beta_1 | b1   | 0.9     | 0 <= b1 < 1 |
    | beta_2 | b2   | 0.99    | 0 <= b2 < 1 |
    | tau    | tau  | 0.001   | tau > 0     |

    eta_g is 0.01 unless set: a coordinate moves by about that per round, whatever eta_l is. ``server_optimizer =
    "yogi"`` gives any other method the same rule.

    Departures: none known.

    Confidence: the paper's Algorithm 2; golden values from 50 digits.

    >>> FedYogi().hyper()
    {'b1': 0.9, 'tau': 0.001, 'b2': 0.99}
    """

    name: ClassVar[str] = "fedyogi"
    title: ClassVar[str] = "FedYogi"

    @property
    def optimizer(self) -> ServerOptimizer:
        """Yogi."""
        return ServerYogi(b1=self.b1, b2=self.b2, tau=self.tau)
