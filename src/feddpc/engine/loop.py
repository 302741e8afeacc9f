"""The reference engine: one client after the other, plain autograd. This is the specification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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


def _own_noise(task: Task, seed: int, device: torch.device) -> AbstractContextManager[object]:
    """Give layers that draw for themselves (dropout) this client's stream, and leave the global one untouched."""
    if not task.stochastic:
        return nullcontext()
    return _seeded(seed, device)


class _seeded:  # noqa: N801
    def __init__(self, seed: int, device: torch.device) -> None:
        self.fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        self.seed = seed

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *exc: object) -> None:
        self.fork.__exit__(*exc)
