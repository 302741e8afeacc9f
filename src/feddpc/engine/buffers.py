"""Places in memory that graphs work on, and small helpers of capturing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from feddpc.methods.base import State


@dataclass
class Inputs:
    """What changes from round to round, at places that stay."""

    index: Tensor  # [K, m, B]
    mask: Tensor  # [K, m, B]
    draws: Tensor | None  # [K, m, B, 3]
    clients: Tensor
    weights: Tensor
    shares: Tensor | None
    counts: Tensor  # K_j in float64, for the server
    steps: Tensor  # K_j in the model's type, for the clients
    rates: Tensor  # client_lr, server_lr
    own: State
    slots: State


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out: an old graph that it frees would break the capture of a new one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def row_classes(m: int, *, every: bool) -> list[int]:
    """Return the numbers of rows for which a step is captured: all where a row is cheap to add, else halves of m.

    >>> row_classes(10, every=False), row_classes(3, every=True)
    ([10, 5], [3, 2, 1])
    """
    return list(range(m, 0, -1)) if every else list(dict.fromkeys([m, -(-m // 2)]))


def kept(buffers: State, values: State) -> State:
    """Copy ``values`` into ``buffers`` that exist and fit, else make new ones."""
    if buffers.keys() == values.keys() and all(buffers[k].shape == v.shape for k, v in values.items()):
        for key, value in values.items():
            buffers[key].copy_(value)
        return buffers
    return {k: v.clone() for k, v in values.items()}
