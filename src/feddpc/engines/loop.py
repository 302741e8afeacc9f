"""The reference engine: one client after the other, plain autograd. This is the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Engine, Trained, stack
from feddpc.methods.base import ClientContext, Method, State
from feddpc.tasks.base import BatchIndices, Task, forked

R = TypeVar("R")


class Loop(Engine):
    """One client after the other."""

    name: ClassVar[str] = "loop"

    @torch.no_grad()
    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Ask one client after the other."""

        def ask(task: Task, i: int) -> State:
            with _own_noise(task, plan, i, w.device):
                return method.probe(task, w, _batches(plan, i, w.device))

        return stack(self.each(ask, task, plan))

    @torch.no_grad()
    def train(
        self, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
    ) -> Trained:
        """Train one client after the other."""

        def one(task: Task, i: int) -> tuple[State, State, Tensor]:
            # Copied, as a node of a federation has it: with another alignment, sums may differ in the last bit.
            mine = {k: v[i].clone() for k, v in memory.items()}
            ctx = ClientContext(w, broadcast, mine, lr, torch.tensor(plan.steps[i], dtype=w.dtype, device=w.device))
            y, total = method.start(ctx), w.new_zeros(())
            with _own_noise(task, plan, i, w.device):
                for rows in _batches(plan, i, w.device):
                    y, loss = method.step(task, y, task.fetch(rows), ctx)
                    total = total + loss
            upload, new = method.finish(y, ctx)
            return upload, new, total / max(plan.steps[i], 1)

        uploads, memories, losses = zip(*self.each(one, task, plan), strict=True)
        return Trained(stack(uploads), stack(memories), torch.stack(losses))

    def each(self, work: Callable[[Task, int], R], task: Task, plan: BatchPlan) -> list[R]:
        """Do ``work`` for every client of ``plan``."""
        return [work(task, i) for i in range(len(plan.clients))]


def _batches(plan: BatchPlan, i: int, device: torch.device) -> Iterator[BatchIndices]:
    for k in range(plan.steps[i]):
        n = plan.count[i, k]
        draws = None if plan.draws is None else torch.from_numpy(plan.draws[i, k, :n]).to(device)
        yield BatchIndices(torch.from_numpy(plan.index[i, k, :n]).to(device), draws=draws)


def _own_noise(task: Task, plan: BatchPlan, i: int, device: torch.device) -> AbstractContextManager[object]:
    """Give modules that draw for themselves (dropout) this client's stream, and leave the global one untouched."""
    return forked(device, plan.noise[i]) if task.stochastic else nullcontext()
