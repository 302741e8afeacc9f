"""The reference engine: one client after the other, plain autograd. This is the specification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from feddpc.data.batches import Plan
from feddpc.engine.base import Engine, Trained, stack
from feddpc.methods.base import Local, Method, State
from feddpc.task import Rows, Task


class Loop(Engine):
    """One client after the other."""

    name: ClassVar[str] = "loop"

    @torch.no_grad()
    def probe(self, method: Method, task: Task, w: Tensor, plan: Plan) -> State:
        """Ask one client after the other."""
        return stack([method.probe(task, w, _batches(plan, i, w.device)) for i in range(len(plan.clients))])

    @torch.no_grad()
    def train(self, method: Method, task: Task, w: Tensor, down: State, own: State, plan: Plan, lr: float) -> Trained:
        """Train one client after the other."""
        ups, owns, losses = [], [], []
        for i in range(len(plan.clients)):
            mine = {k: v[i] for k, v in own.items()}
            here = Local(w, down, mine, lr, torch.tensor(plan.steps[i], dtype=w.dtype, device=w.device))
            y, total = method.start(here), w.new_zeros(())
            with _own_noise(task, plan.noise[i], w.device):
                for rows in _batches(plan, i, w.device):
                    y, loss = method.step(task, y, task.fetch(rows), here)
                    total = total + loss
            up, new = method.finish(y, here)
            ups.append(up)
            owns.append(new)
            losses.append(total / here.steps)
        return Trained(stack(ups), stack(owns), torch.stack(losses))


def _batches(plan: Plan, i: int, device: torch.device) -> Iterator[Rows]:
    for k in range(plan.steps[i]):
        n = plan.count[i, k]
        draws = None if plan.draws is None else torch.from_numpy(plan.draws[i, k, :n]).to(device)
        yield Rows(torch.from_numpy(plan.index[i, k, :n]).to(device), draws=draws)


@contextmanager
def _own_noise(task: Task, seed: int, device: torch.device) -> Iterator[None]:
    """Give layers that draw for themselves (dropout) this client's stream, and leave the global one untouched."""
    if not task.stochastic:
        yield
        return
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        generator.manual_seed(seed)
        yield
