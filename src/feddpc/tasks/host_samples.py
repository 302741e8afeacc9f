"""Training samples that stay in host memory or in files; those of a cohort are copied to the device before its steps.

While a cohort trains, a thread reads the samples of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data import Dataset
from feddpc.data.batches import BatchPlan
from feddpc.data.partition import Partition

Ints = NDArray[np.int64]
#: Reads samples and targets by their numbers into host memory.
Read = Callable[[Ints], tuple[Tensor, Tensor]]


def is_mapped(array: NDArray[np.generic]) -> bool:
    """Say whether an array is a file, or a part of one, that is mapped into memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def sample_tensor(data: Dataset, x: np.ndarray, *, together: bool = False) -> Tensor:
    """Return samples of ``data`` as a tensor; images ``[n, h, w, c]`` become ``[n, c, h, w]``.

    With ``together`` the channels of a pixel stay together in memory.
    """
    samples = torch.from_numpy(np.array(x, order="C"))
    if not data.is_image:
        return samples
    return samples.movedim(3, 1) if together else samples.movedim(3, 1).contiguous()


class HostSamples:
    """The samples of some clients on the device, in place of all; plans get the places where their samples lie now."""

    def __init__(self, read: Read, device: torch.device | str, capacity: int = 0) -> None:
        self.device = torch.device(device)
        self.x, self.y = (part.to(self.device) for part in read(np.zeros(1, np.int64)))
        self.generation = 0  #: how often the tensors had to be replaced by larger ones
        self._read, self._capacity = read, capacity
        self._ids, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._clients: Ints = np.zeros(0, np.int64)
        self._next: tuple[Ints, Future[tuple[Ints, Tensor, Tensor]]] | None = None
        self._pool = ThreadPoolExecutor(1, "feddpc-samples")

    def stage(self, plan: BatchPlan, partition: Partition) -> BatchPlan:
        """Copy the samples of the clients of ``plan``, unless they are there; return the plan for where they lie."""
        if not np.isin(plan.clients, self._clients).all():
            ids, x, y = self._take(plan.clients, partition)
            self._make_room(len(ids), x, y)
            self.x[: len(ids)].copy_(x, non_blocking=True)
            self.y[: len(ids)].copy_(y, non_blocking=True)
            order = np.argsort(ids, kind="stable")
            self._ids, self._places, self._clients = ids[order], order, plan.clients
        valid = plan.count[:, :, None] > np.arange(plan.index.shape[2])
        at = np.searchsorted(self._ids, np.where(valid, plan.index, self._ids[0] if len(self._ids) else 0))
        return replace(plan, index=np.where(valid, self._places[np.minimum(at, len(self._ids) - 1)], 0))

    def read_ahead(self, clients: Ints, partition: Partition) -> None:
        """Read the samples of ``clients``, who come next, in the background."""
        if self._next is None or not np.array_equal(self._next[0], clients):
            self._next = clients, self._pool.submit(self._load, clients, partition)

    def _take(self, clients: Ints, partition: Partition) -> tuple[Ints, Tensor, Tensor]:
        ahead, self._next = self._next, None
        if ahead is not None and np.array_equal(ahead[0], clients):
            return ahead[1].result()
        return self._load(clients, partition)

    def _load(self, clients: Ints, partition: Partition) -> tuple[Ints, Tensor, Tensor]:
        ids = np.unique(np.concatenate([partition[int(c)] for c in clients]))  # in the order of the file
        x, y = self._read(ids)
        if self.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return ids, x, y

    def _make_room(self, needed: int, x: Tensor, y: Tensor) -> None:
        if len(self.x) >= max(needed, self._capacity):
            return
        self._capacity = max(self._capacity, needed + needed // 4)
        self.x = torch.empty((self._capacity, *x.shape[1:]), dtype=x.dtype, device=self.device)
        self.y = torch.empty((self._capacity, *y.shape[1:]), dtype=y.dtype, device=self.device)
        self.generation += 1
