"""Places in memory that graphs work on, and small helpers of capturing."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.methods.base import State

Shapes = Mapping[str, tuple[int, ...]]


class HostTransfer:
    """Arrays of one type that go to the device in one copy per round.

    The host writes into one of two buffers in turn, because the copy of the other may still be under way.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, pinned = shapes, device.type == "cuda"
        size = sum(math.prod(shape) for shape in shapes.values())
        self._there = torch.zeros(size, dtype=dtype, device=device)
        self._here = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self.there = self._parts(self._there)

    def _parts(self, whole: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(whole, [math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def open(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to write into."""
        self._here.reverse()
        return {name: part.numpy() for name, part in self._parts(self._here[0]).items()}

    def send(self) -> None:
        """Copy what was written to the device, without waiting."""
        self._there.copy_(self._here[0], non_blocking=True)


@dataclass
class Inputs:
    """What changes from round to round, at places that stay."""

    index: Tensor  # [K, m, B]
    count: Tensor  # [K, m]
    draws: Tensor | None  # [K, m, B, 3]
    clients: Tensor
    weights: Tensor
    counts: Tensor  # K_j in float64, for the server
    steps: Tensor  # K_j in the model's type, for the clients
    rates: Tensor  # client_lr, server_lr
    own: State
    slots: State


#: Only one run at a time is captured or compiled; those in other threads go on meanwhile.
CAPTURING = threading.Lock()


@contextmanager
def capturing() -> Iterator[None]:
    """Keep others out, the garbage collector too: an old graph that it frees would break the capture of a new one."""
    with CAPTURING:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@cache
def capture_stream(device: torch.device) -> Any:
    """Return the stream on which everything is captured; of a priority that no run is given by chance."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def graph_of(do: Callable[[], None], device: torch.device, pool: Any = None) -> Any:
    """Capture what ``do`` does; graphs that may run at the same time must not share a ``pool`` of memory.

    Nor may they share the scratch memory of matrix products, which torch keeps by stream: two products at once would
    write into each other's sums, or wait for each other for ever. It is forgotten before, so that the graph gets its
    own, and afterwards, so that no other graph gets it.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    forget = torch._C._cuda_clearCublasWorkspaces
    forget()
    with torch.cuda.stream(capture_stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            do()
        finally:
            graph.capture_end()
            forget()
    return graph


def row_classes(m: int, *, every: bool) -> list[int]:
    """Return the numbers of rows for which a step is captured: all where a row is cheap to add, else halves of m.

    >>> row_classes(10, every=False), row_classes(3, every=True)
    ([10, 5], [3, 2, 1])
    """
    return list(range(m, 0, -1)) if every else list(dict.fromkeys([m, -(-m // 2)]))


def width_classes(width: int, *, parts: int) -> list[int]:
    """Return the numbers of samples for which a client's step is captured, the whole batch first.

    >>> width_classes(256, parts=4), width_classes(3, parts=4)
    ([256, 192, 128, 64], [3, 2, 1])
    """
    return list(dict.fromkeys(-(-width * p // parts) for p in range(parts, 0, -1)))


def kept(buffers: State, values: State) -> State:
    """Copy ``values`` into ``buffers`` that exist and fit, else make new ones."""
    if buffers.keys() == values.keys() and all(buffers[k].shape == v.shape for k, v in values.items()):
        for key, value in values.items():
            buffers[key].copy_(value)
        return buffers
    return {k: v.clone() for k, v in values.items()}
