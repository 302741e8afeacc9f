"""The only round loop: sample, probe, broadcast, train, screen, aggregate, evaluate, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import Plan, Planner
from feddpc.engine.base import Engine
from feddpc.engine.memory import Memory
from feddpc.engine.sampler import Sampler
from feddpc.methods.base import Cohort, Method, State
from feddpc.task import Task

Ints = NDArray[np.int64]
Evaluate = Callable[[Tensor], tuple[float, float]]


@dataclass(frozen=True)
class Federation:
    """Everything that all methods of a comparison share: the task, who holds what, who comes when, and the rates."""

    task: Task
    planner: Planner
    sampler: Sampler
    client_lr: float
    server_lr: float
    lr_decay: float = 1.0
    weighting: str = "uniform"
    evaluate: Evaluate | None = None

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.planner.partition)

    def rates(self, round: int) -> tuple[float, float]:
        """Return the local and the server rate of a round; they decay together, so that their ratio stays."""
        decay = self.lr_decay ** (round - 1)
        return self.client_lr * decay, self.server_lr * decay


@dataclass
class Progress:
    """Where a run stands: the model, all memories, and the last finished round."""

    w: Tensor
    server: State
    slots: Memory
    clients: Memory
    round: int = 0

    @classmethod
    def begin(cls, method: Method, w: Tensor, population: int) -> Progress:
        """Return the state before round 1; ``w`` itself is left as it is."""
        return cls(
            w=w.clone(),
            server=method.init_server(w, population),
            slots=Memory(lambda: method.init_slot(w), f"{method.name}: the server's memory of a client", population),
            clients=Memory(lambda: method.init_client(w), f"{method.name}: a client's memory", population),
        )


@dataclass(frozen=True)
class Record:
    """What is known about one finished round."""

    round: int
    test_accuracy: float
    test_loss: float
    train_loss: float
    seconds: float
    participants: list[int]
    dropped: list[int]
    rejected: list[int]
    notes: dict[str, float] = field(default_factory=dict)
    diverged: str | None = None


def advance(federation: Federation, method: Method, engine: Engine, progress: Progress) -> Record:
    """Run the next round: ``progress`` is moved on, and what happened is returned."""
    began = time.perf_counter()
    t = progress.round + 1
    draw = federation.sampler.draw(t)
    kept, loss, notes = _exchange(federation, method, engine, progress, t, draw.answered)
    if not len(kept):
        progress.server = method.idle(progress.server)
    progress.round = t
    rejected = np.setdiff1d(draw.answered, kept)
    evaluate = federation.evaluate or (lambda _: (math.nan, 0.0))
    accuracy, test_loss = evaluate(method.evaluated(progress.w, progress.server))
    return Record(
        round=t,
        test_accuracy=accuracy,
        test_loss=test_loss,
        train_loss=loss,
        seconds=time.perf_counter() - began,
        participants=kept.tolist(),
        dropped=draw.dropped.tolist(),
        rejected=rejected.tolist(),
        notes=notes,
        diverged=_diverged(progress.w, test_loss, len(kept), len(rejected)),
    )


def _exchange(
    federation: Federation, method: Method, engine: Engine, progress: Progress, t: int, ids: Ints
) -> tuple[Ints, float, dict[str, float]]:
    """Let clients ``ids`` train and the server aggregate; return whose updates counted, their loss, and the notes."""
    task, planner, w = federation.task, federation.planner, progress.w
    client_lr, _ = federation.rates(t)
    probed: State = {}
    if method.probes and len(ids):
        probed = engine.probe(method, task, w, planner.sweep(ids))
        ids, (probed,) = screen(ids, probed)
    if not len(ids):
        return ids, math.nan, {}
    plan = planner.plan(t, ids)
    cohort = _cohort(federation, progress, t, ids, plan)
    down = method.broadcast(w, progress.server, probed, cohort)
    own = progress.clients.read(ids)
    trained = engine.train(method, task, w, down, own | probed, plan, client_lr)
    kept, (up, own, losses) = screen(ids, trained.up, trained.own, {"loss": trained.loss})
    if not len(kept):
        return kept, math.nan, {}
    if len(kept) < len(ids):
        cohort = _cohort(federation, progress, t, kept, planner.plan(t, kept))
    step = method.aggregate(w, progress.server, up, cohort)
    step.apply_(progress.w)
    progress.server = step.server
    progress.slots.write(kept, step.slots)
    progress.clients.write(kept, own)
    return kept, float(losses["loss"].mean()), {k: float(v) for k, v in step.notes.items()}


def _cohort(federation: Federation, progress: Progress, t: int, ids: Ints, plan: Plan) -> Cohort:
    client_lr, server_lr = federation.rates(t)
    device = progress.w.device
    shares = plan.sizes / plan.sizes.sum() if federation.weighting == "samples" else np.full(len(ids), 1 / len(ids))
    return Cohort(
        round=t,
        clients=torch.tensor(ids, device=device),
        population=federation.population,
        weights=torch.tensor(shares, device=device),
        steps=torch.tensor(plan.steps, dtype=torch.float64, device=device),
        client_lr=client_lr,
        server_lr=server_lr,
        slots=progress.slots.read(ids),
    )


def screen(ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Drop every client with a non-finite number in what it sent or would remember, before any arithmetic sees it."""
    tensors = [v.reshape(len(ids), -1) for state in states for v in state.values()]
    # A sum is finite only if all its terms are, and it is one fast pass; the exact look is for the rare other case.
    if all(bool(t.sum().isfinite()) for t in tensors):
        return ids, states
    good = torch.stack([t.isfinite().all(1) for t in tensors]).all(0)
    return ids[good.cpu().numpy()], tuple({k: v[good] for k, v in state.items()} for state in states)


def _diverged(w: Tensor, test_loss: float, kept: int, rejected: int) -> str | None:
    """Say why a run must stop, or return None."""
    if rejected and not kept:
        return f"all {rejected} updates were non-finite"
    if not bool(w.sum().isfinite() or w.isfinite().all()):
        return "the model has non-finite parameters"
    if not math.isfinite(test_loss):
        return f"the test loss is {test_loss}"
    return None
