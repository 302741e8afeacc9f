"""Optimizers of clients and server: pure rules on tensors, chosen by name.

A client's optimizer makes local steps by torch's own rule (``torch.optim.SGD``, ``Adam``, ``AdamW``) from a state that
is zero at the start of every round. A server's optimizer makes a step from a method's direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from feddpc.checks import check_positive, check_probability
from feddpc.errors import BadInputError
from feddpc.registry import Registry

State = dict[str, Tensor]


# Clients.


@dataclass(frozen=True, kw_only=True)
class ClientOptimizer(ABC):
    """How a client steps along a direction. Its state is one vector, which starts at zero in every round."""

    clip_norm: float | None = None  #: directions longer than this are shortened to it
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        _check_from_zero("client_optimizer.weight_decay", self.weight_decay)

    @property
    def features(self) -> dict[str, object]:
        """What makes a step more than a plain one, by the names of the settings, with their values."""
        options = {"clip_norm": self.clip_norm, "weight_decay": self.weight_decay}
        return {name: value for name, value in options.items() if value}

    @property
    def momentum_of_clients(self) -> float:
        """The momentum by which the clients' steps add up."""
        return 0.0

    @abstractmethod
    def state_size(self, d: int) -> int:
        """Return how many numbers the state of a model of ``d`` parameters has."""

    @abstractmethod
    def step(self, y: Tensor, g: Tensor, state: Tensor, lr: Any) -> list[Tensor]:
        """Return the new ``y`` after a step along ``g``, and the parts of the new state."""

    def clipped(self, g: Tensor) -> Tensor:
        """Return ``g``, shortened to ``clip_norm`` if it is longer."""
        if self.clip_norm is None:
            return g
        length: Tensor = torch.linalg.vector_norm(g)
        return g * (self.clip_norm / length.clamp(min=self.clip_norm))

    def decayed(self, y: Tensor, g: Tensor) -> Tensor:
        """Return ``g`` with the gradient of the decay, ``weight_decay / 2 |y|^2``."""
        return torch.add(g, y, alpha=self.weight_decay) if self.weight_decay else g


@dataclass(frozen=True, kw_only=True)
class SGD(ClientOptimizer):
    """``torch.optim.SGD`` without dampening.

    >>> rule = SGD(momentum=0.5)
    >>> y, m = rule.step(torch.tensor([1.0]), torch.tensor([2.0]), torch.zeros(1), 0.1)
    >>> rule.step(y, torch.tensor([2.0]), m, 0.1)  # y = 0.8 - 0.1 (2 + 0.5 * 2)
    [tensor([0.5000]), tensor([3.])]
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("client_optimizer.momentum", self.momentum, one=False)
        _check_switch("client_optimizer.nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise BadInputError("client_optimizer.nesterov = True needs client_optimizer.momentum above 0: give one")

    @property
    def features(self) -> dict[str, object]:
        """Decay and clipping, momentum, and Nesterov's look ahead."""
        options = {"momentum": self.momentum, "nesterov": self.nesterov}
        return super().features | {name: value for name, value in options.items() if value}

    @property
    def momentum_of_clients(self) -> float:
        """The momentum."""
        return self.momentum

    def state_size(self, d: int) -> int:
        """The momentum has the size of the model."""
        return d if self.momentum else 0

    def step(self, y: Tensor, g: Tensor, state: Tensor, lr: Any) -> list[Tensor]:
        """m <- momentum m + g; y <- y - lr m, or with Nesterov y - lr (g + momentum m)."""
        g = self.decayed(y, g)
        if not self.momentum:
            return [y - lr * g]
        m = torch.add(g, state, alpha=self.momentum)
        direction = torch.add(g, m, alpha=self.momentum) if self.nesterov else m
        # In one pass where the rate is a number, not a tensor that a captured graph reads.
        return [torch.add(y, direction, alpha=-lr) if isinstance(lr, float) else y - lr * direction, m]


@dataclass(frozen=True, kw_only=True)
class Adam(ClientOptimizer):
    """``torch.optim.Adam``; its state ends with 1 - b1^k and 1 - b2^k, which correct the bias after k steps."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decoupled: ClassVar[bool] = False  #: whether the decay shortens the model itself, and not the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("b1", "b2"):
            check_probability(f"client_optimizer.{name}", getattr(self, name), one=False)
        check_positive("client_optimizer.eps", self.eps)

    @property
    def features(self) -> dict[str, object]:
        """Decay and clipping, and Adam's own step."""
        return super().features | {"adam": "adamw" if self.decoupled else "adam"}

    def state_size(self, d: int) -> int:
        """Two moments of the gradient, and two numbers."""
        return 2 * d + 2

    def step(self, y: Tensor, g: Tensor, state: Tensor, lr: Any) -> list[Tensor]:
        """Adam's step."""
        d, b1, b2 = len(y), self.b1, self.b2
        if self.decoupled:
            y = y - (lr * self.weight_decay) * y
        else:
            g = self.decayed(y, g)
        m = torch.lerp(state[:d], g, 1 - b1)
        v = torch.addcmul(b2 * state[d : 2 * d], g, g, value=1 - b2)
        # 1 - b^k by its recurrence: as a difference it would lose most digits of float32 in the first steps.
        c1, c2 = b1 * state[2 * d : -1] + (1 - b1), b2 * state[2 * d + 1 :] + (1 - b2)
        scale = v.sqrt().div_(c2.sqrt()).add_(self.eps).mul_(c1 / lr)
        return [torch.addcdiv(y, m, scale, value=-1), m, v, c1, c2]


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """``torch.optim.AdamW``: Adam with decoupled weight decay."""

    weight_decay: float = 0.01
    decoupled: ClassVar[bool] = True


CLIENT_OPTIMIZERS: Registry[ClientOptimizer] = Registry(
    "client optimizer", {"sgd": SGD, "adam": Adam, "adamw": AdamW}, arguments=("clip_norm",)
)


def make_client_optimizer(name: str, options: Mapping[str, Any], clip_norm: float | None = None) -> ClientOptimizer:
    """Return the client optimizer ``name``.

    >>> make_client_optimizer("sgd", {"momentum": 0.9}).features
    {'momentum': 0.9}
    >>> make_client_optimizer("sgdm", {})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown client optimizer 'sgdm': did you mean 'sgd'? Valid: adam, adamw, sgd
    """
    return CLIENT_OPTIMIZERS.builder(name, options)(clip_norm=clip_norm, **options)


# Server.


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(ABC):
    """How the server steps along a method's direction, from a state that it keeps between rounds."""

    #: The usual learning rate; None: that of the clients.
    server_lr: ClassVar[float | None] = None

    @abstractmethod
    def initial(self, w: Tensor) -> State:
        """Return the state before round 1."""

    @abstractmethod
    def direction(self, delta: Tensor, state: State, client_lr: Any) -> tuple[Tensor, State]:
        """Return where the server goes, ``w_t = w_{t-1} - server_lr * direction``, and the new state.

        ``delta`` is the method's own direction, an accumulated gradient, and ``client_lr * delta`` a change of models.
        """


@dataclass(frozen=True, kw_only=True)
class ServerMomentum(ServerOptimizer):
    """m_t = beta m_{t-1} + Delta_t, the direction."""

    beta: float = 0.9

    def __post_init__(self) -> None:
        check_probability("server_optimizer.beta", self.beta, one=False)

    def initial(self, w: Tensor) -> State:
        """No direction yet."""
        return {"m": torch.zeros_like(w)}

    def direction(self, delta: Tensor, state: State, client_lr: Any) -> tuple[Tensor, State]:
        """Return the momentum."""
        m = torch.add(delta, state["m"], alpha=self.beta)
        return m, {"m": m}


@dataclass(frozen=True, kw_only=True)
class ServerAdagrad(ServerOptimizer):
    """m_t = b1 m_{t-1} + (1 - b1) x_t and v_t = v_{t-1} + x_t^2 of x_t = eta_l Delta_t; m_t / (sqrt(v_t) + tau)."""

    server_lr: ClassVar[float | None] = 0.01

    b1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_probability("server_optimizer.b1", self.b1, one=False)
        check_positive("server_optimizer.tau", self.tau)

    def initial(self, w: Tensor) -> State:
        """m_0 = 0 and v_0 = tau^2."""
        return {"m": torch.zeros_like(w), "v": torch.full_like(w, self.tau**2)}

    def direction(self, delta: Tensor, state: State, client_lr: Any) -> tuple[Tensor, State]:
        """Return the scaled mean of the changes; there is no correction of bias."""
        x, largest = client_lr * delta, torch.finfo(delta.dtype).max
        square = x.square().clamp(max=largest)  # of a change beyond the root of the largest number
        m, v = torch.lerp(state["m"], x, 1 - self.b1), self.second_moment(state["v"], square).clamp(max=largest)
        return m / (v.sqrt() + self.tau), {"m": m, "v": v}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v_t."""
        return v + square


@dataclass(frozen=True, kw_only=True)
class ServerAdam(ServerAdagrad):
    """As Adagrad, with v_t = b2 v_{t-1} + (1 - b2) x_t^2."""

    b2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("server_optimizer.b2", self.b2, one=False)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v_t."""
        return torch.lerp(v, square, 1 - self.b2)


@dataclass(frozen=True, kw_only=True)
class ServerYogi(ServerAdam):
    """As Adam, with v_t = v_{t-1} - (1 - b2) x_t^2 sign(v_{t-1} - x_t^2)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v_t."""
        return v - (1 - self.b2) * square * torch.sign(v - square)


def _plain_server() -> None:
    """Return no optimizer: the method's own step."""


SERVER_OPTIMIZERS: Registry[ServerOptimizer | None] = Registry(
    "server optimizer",
    {
        "sgd": _plain_server,
        "momentum": ServerMomentum,
        "adam": ServerAdam,
        "yogi": ServerYogi,
        "adagrad": ServerAdagrad,
    },
)
#: What the names of a server optimizer's state start with among the things that the server remembers.
SERVER_STATE = "optimizer."


def make_server_optimizer(name: str, options: Mapping[str, Any]) -> ServerOptimizer | None:
    """Return the server optimizer ``name``; None for ``sgd``, which is the method's own step."""
    return SERVER_OPTIMIZERS.builder(name, options)(**options)


def server_state(server: State) -> State:
    """Return what of the server's memory belongs to the server optimizer."""
    return {key: value for key, value in server.items() if key.startswith(SERVER_STATE)}


# Options.


def complete_options(registry: Registry[Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``name`` with their defaults, for a record; none where only defaults of ``sgd`` are given.

    >>> complete_options(CLIENT_OPTIMIZERS, "sgd", {"momentum": 0.9})
    {'weight_decay': 0.0, 'momentum': 0.9, 'nesterov': False}
    >>> complete_options(CLIENT_OPTIMIZERS, "sgd", {"momentum": 0.0})
    {}
    """
    registry.builder(name, options)
    defaults = registry.options(name)
    complete = {**defaults, **options}
    return {} if name == "sgd" and complete == defaults else complete


def _check_from_zero(field: str, value: object) -> None:
    if value != 0:
        try:
            check_positive(field, value)
        except BadInputError:
            raise BadInputError(f"{field} = {value!r}: must be a finite number of at least 0") from None


def _check_switch(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadInputError(f"{field} = {value!r}: must be true or false")
