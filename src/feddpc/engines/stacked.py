"""The vectorised engine: a method's hooks under ``vmap`` over the cohort, one local step of all clients at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Engine, Trained
from feddpc.methods.base import ClientContext, Method, State
from feddpc.tasks.base import BatchIndices, Task

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Stacked(Engine):
    """All clients at once.

    Clients are sorted by their number of steps, so that those still training are the first rows of the stack. With
    ``narrow`` a step runs on these rows only; without it, it runs on all and a mask keeps the finished ones as they
    are, which is what a captured graph of fixed shape needs. ``wrap`` is applied to the vectorised step: the place for
    a compiler.
    """

    name: ClassVar[str] = "stacked"

    def __init__(self, *, narrow: bool = True, wrap: Wrap | None = None) -> None:
        self.narrow = narrow
        self.wrap: Wrap = wrap or (lambda f: f)

    def refuses(self, task: Task) -> str | None:
        """Modules that draw for themselves would draw other numbers, and those that mix samples would see padding."""
        if task.stochastic:
            return "the model draws random numbers (dropout), which cannot be reproduced here"
        if task.traits.mixes_samples:
            return "the model mixes the samples of a batch (BatchNorm), and would see padding here"
        if task.traits.statistics:
            return f"training changes buffer {task.traits.statistics[0]!r} of the model, which cannot be stacked"
        return None

    @torch.no_grad()
    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Ask all clients at once."""
        task = task.transformable()
        index, mask, *_ = _rows(plan, w.device)

        def ask(index: Tensor, mask: Tensor) -> State:
            return method.probe(task, w, [BatchIndices(i, m) for i, m in zip(index, mask, strict=True)])

        before = replace(task.work)
        probed: State = vmap(ask)(index, mask)
        # Clients with fewer batches went along on padding, which does not count as work.
        batches, longest = int(plan.steps.sum()), int(plan.steps.max())
        for key in ("gradients", "passes"):
            once = (getattr(task.work, key) - getattr(before, key)) // longest
            setattr(task.work, key, getattr(before, key) + once * batches)
        return probed

    @torch.no_grad()
    def train(
        self, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
    ) -> Trained:
        """Train all clients at once."""
        task = task.transformable()
        order = np.argsort(-plan.steps, kind="stable")
        sort, back = (torch.from_numpy(i).to(w.device) for i in (order, np.argsort(order)))
        steps = torch.from_numpy(plan.steps).to(w.device, w.dtype)[sort]
        rows = [t[sort] for t in _rows(plan, w.device)]
        own = {k: v[sort] for k, v in memory.items()}

        def start(own: State, steps: Tensor) -> Tensor:
            return method.start(ClientContext(w, broadcast, own, lr, steps))

        def step(y: Tensor, own: State, steps: Tensor, live: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
            new, loss = method.step(
                task, y, task.fetch(BatchIndices(*rows)), ClientContext(w, broadcast, own, lr, steps)
            )
            return (new, loss) if self.narrow else (torch.where(live, new, y), torch.where(live, loss, 0.0))

        def finish(y: Tensor, own: State, steps: Tensor) -> tuple[State, State]:
            return method.finish(y, ClientContext(w, broadcast, own, lr, steps))

        all_step = self.wrap(vmap(step))
        y, total = vmap(start)(own, steps), torch.zeros_like(steps)
        for k in range(int(plan.steps.max())):
            n = int((plan.steps > k).sum()) if self.narrow else len(steps)
            width = int(plan.count[:, k].max()) if self.narrow else plan.index.shape[2]
            mine = {key: v[:n] for key, v in own.items()}
            task.work.clients = n
            moved, loss = all_step(y[:n], mine, steps[:n], steps[:n] > k, *(t[:n, k, :width] for t in rows))
            y = moved if n == len(y) else torch.cat([moved, y[n:]])
            total[:n] += loss
        task.work.clients = 1
        up, new = vmap(finish)(y, own, steps)
        loss = total / steps.clamp(min=1)
        return Trained({k: v[back] for k, v in up.items()}, {k: v[back] for k, v in new.items()}, loss[back])


def _rows(plan: BatchPlan, device: torch.device) -> list[Tensor]:
    """Return index, mask and, when the data are augmented, draws, as :class:`BatchIndices` wants them."""
    index, count = (torch.from_numpy(a).to(device) for a in (plan.index, plan.count))
    mask = torch.arange(index.shape[2], device=device) < count[..., None]
    return [index, mask] if plan.draws is None else [index, mask, torch.from_numpy(plan.draws).to(device)]
