"""A method whose clients step by an optimizer: the same method for every engine, with a longer vector to carry."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import ClientContext, Method, State, overrides
from feddpc.optimizers import ClientOptimizer
from feddpc.tasks.base import Batch, Task


def check_local_steps(method: Method, optimizer: ClientOptimizer) -> None:
    """Refuse an optimizer that ``method`` cannot have at its clients."""
    features = optimizer.features
    if features and overrides(method, "step"):
        feature, value = next(iter(features.items()))
        raise BadInputError(
            f"{_setting(feature)} = {value!r}: {method.name} makes local steps of its own, which an optimizer would "
            "change: use plain SGD, or override `local_direction` instead of `step` in a method of yours"
        )
    for feature, value in features.items():
        if feature in method.needs_plain_steps:
            raise BadInputError(
                f"{_setting(feature)} = {value!r}: {method.name} takes what a client moved for its gradients, which "
                f"that would change: leave it out, or choose another method"
            )


def with_optimizer(method: Method, optimizer: ClientOptimizer) -> Method:
    """Return ``method`` with local steps by ``optimizer``; the method itself if those are plain steps."""
    if not optimizer.features:
        return method
    check_local_steps(method, optimizer)
    kind: Any = type(method)  # for a type checker, the class of a frozen dataclass is not hashable
    local: Method = object.__new__(_class(kind, optimizer))
    local.__dict__.update(method.__dict__)
    return local


class _Optimized(Method):
    """The client half with an optimizer: what is carried from step to step is the local model and then the state."""

    optimizer_: ClassVar[ClientOptimizer]
    plain_: ClassVar[type[Method]]

    @property
    def _plain(self) -> Method:
        """The method without optimizer, whose hooks may call each other; with the numbers that this one has now."""
        plain: Method = object.__new__(self.plain_)
        plain.__dict__.update(self.__dict__)
        return plain

    def start(self, ctx: ClientContext) -> Tensor:
        """The method's own start, and a state of zeros."""
        y = self._plain.start(ctx)
        size = self.optimizer_.state_size(len(y))
        return torch.cat([y, y.new_zeros(size)]) if size else y

    def step(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """One step of the optimizer along the method's direction, clipped if it is long."""
        d = len(ctx.w)
        y, state = y[:d], y[d:]
        g, value = self._plain.local_direction(task, y, batch, ctx)
        parts = self.optimizer_.step(y, self.optimizer_.clipped(g), state, ctx.lr)
        return torch.cat(parts) if len(parts) > 1 else parts[0], value

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """The method's own end; the state is forgotten."""
        return self._plain.finish(y[: len(ctx.w)], ctx)


@functools.lru_cache(maxsize=64)
def _class(kind: type[Method], optimizer: ClientOptimizer) -> type[Method]:
    """Return ``kind`` with local steps by ``optimizer``: one class each, as what is compiled for a class is kept."""
    own = {"__module__": kind.__module__, "plain_": kind, "optimizer_": optimizer}
    return type(kind.__name__, (_Optimized, kind), own)


def _setting(feature: str) -> str:
    """Return the setting that a feature of an optimizer belongs to."""
    return {"clip_norm": "clip_norm", "adam": "client_optimizer"}.get(feature, f"client_optimizer.{feature}")
