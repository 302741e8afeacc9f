"""Probes from graphs: all clients that are asked go through their data at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from feddpc.data.batches import BatchPlan
from feddpc.engines.cuda.buffers import HostTransfer, graph_of, kept
from feddpc.methods.base import Method, State
from feddpc.tasks.base import BatchIndices, Task


class Probing:
    """The graph of a method's probe for plans of one shape: a number of clients, batches and samples per batch."""

    def __init__(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> None:
        self.method, self.work, self.task = method, task.work, task.transformable()
        clients, batches, width = plan.index.shape
        self.mail = HostTransfer(
            {"index": (clients, batches, width), "count": (clients, batches)}, torch.int64, w.device
        )
        self.w = w.clone()
        self.answers: State = {}
        self._load(w, plan)
        was = replace(self.work)
        try:
            self._ask()  # so that allocators and compilers are done
            counts = ((getattr(self.work, key) - getattr(was, key)) // batches for key in ("gradients", "passes"))
            self.once = tuple(counts)
            self._replay: Callable[[], Any] = graph_of(self._ask, w.device).replay if w.is_cuda else self._ask
        finally:
            self.work.reset_to(was)

    def __call__(self, w: Tensor, plan: BatchPlan) -> State:
        """Return what the clients of ``plan`` answer at ``w``."""
        self._load(w, plan)
        was, batches = replace(self.work), int(plan.steps.sum())
        self._replay()
        # Clients with fewer batches went along on padding, which does not count as work.
        self.work.gradients = was.gradients + self.once[0] * batches
        self.work.passes = was.passes + self.once[1] * batches
        return {key: value.clone() for key, value in self.answers.items()}

    def release(self) -> None:
        """Let go of everything."""
        if self.w.is_cuda:
            torch.cuda.synchronize(self.w.device)
        vars(self).clear()

    def _load(self, w: Tensor, plan: BatchPlan) -> None:
        arrays = self.mail.open()
        arrays["index"][:], arrays["count"][:] = plan.index, plan.count
        self.mail.send()
        self.w.copy_(w)

    def _ask(self) -> None:
        index, count = (self.mail.there[key] for key in ("index", "count"))
        mask = torch.arange(index.shape[-1], device=index.device) < count[..., None]

        def ask(index: Tensor, mask: Tensor) -> State:
            return self.method.probe(self.task, self.w, [BatchIndices(*rows) for rows in zip(index, mask, strict=True)])

        self.answers = kept(self.answers, vmap(ask)(index, mask))
