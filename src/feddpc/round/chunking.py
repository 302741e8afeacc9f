"""Cohorts too large for the device's memory: trained in chunks that fit, with the same numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Engine, Trained
from feddpc.errors import BadInputError
from feddpc.methods.base import Method, State
from feddpc.tasks.base import Task


def train_in_chunks(
    engine: Engine, method: Method, task: Task, w: Tensor, down: State, own: State, plan: BatchPlan, lr: float
) -> Trained:
    """Train the clients of ``plan``; where memory does not suffice, fewer at a time, and so from then on."""
    m, was = len(plan.clients), replace(task.tally)
    while True:
        wave = min(engine.wave or m, m)
        try:
            parts = []
            for first in range(0, m, wave):
                rows = np.arange(first, min(first + wave, m))
                mine = {k: v[first : first + wave] for k, v in own.items()}
                some = plan if wave == m else plan.take(rows)
                parts.append(engine.train(method, task, w, down, mine, some, lr))
            return _joined(parts)
        except torch.OutOfMemoryError as error:
            if wave == 1:
                raise BadInputError(
                    "the device's memory does not suffice for one client: take a smaller batch_size or model"
                ) from error
        task.tally.put_back(was)  # the next attempt trains all clients again
        # Outside the handler, which would keep the failed attempt's tensors alive.
        if w.is_cuda:
            torch.cuda.empty_cache()
        engine.wave = -(-wave // 2)
        warnings.warn(
            f"out of device memory with {wave} clients at once: going on with {engine.wave} at a time, same numbers",
            stacklevel=2,
        )


def _joined(parts: list[Trained]) -> Trained:
    if len(parts) == 1:
        return parts[0]
    up, own = _stacked([p.up for p in parts]), _stacked([p.own for p in parts])
    return Trained(up, own, torch.cat([p.loss for p in parts]))


def _stacked(states: list[State]) -> State:
    return {key: torch.cat([state[key] for state in states]) for key in states[0]}
