"""Validation data: training samples that no client ever holds, on which settings and rounds may be chosen."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from feddpc.data import Dataset
from feddpc.errors import BadInputError
from feddpc.methods.federated_data import Ids
from feddpc.rng import generator
from feddpc.tasks.network import NetworkTask


def held_counts(share: float, data: Dataset, reserve: Ids) -> Ids:
    """Return how many samples of each class are held out: ``share`` of it, of those that are not in ``reserve``.

    Targets that are not classes form one group.
    """
    groups = data.classes if data.target == "classes" else 1
    available = np.bincount(data.strata, minlength=groups)
    free = available - np.bincount(data.strata[reserve], minlength=groups)
    counts: Ids = np.rint(share * available).astype(np.int64)
    if share and not counts.any():
        raise BadInputError(f"validation = {share} of {len(data.y_train)} samples is less than one of any class")
    short = np.flatnonzero((counts > 0) & (counts >= free))
    if len(short):
        c = short[0]
        raise BadInputError(
            f"validation = {share} takes {counts[c]} samples of class {c}, but only {free[c]} are free: nothing would "
            "be left to the clients; lower it"
        )
    return counts


def held_out(share: float, data: Dataset, reserve: Ids, seed: int) -> Ids:
    """Draw the samples that no client trains on, apart from those that the server has in ``reserve``."""
    counts = held_counts(share, data, reserve)
    if share == 0:
        return np.zeros(0, np.int64)
    rng, free = generator(seed, "validation"), np.setdiff1d(np.arange(len(data.y_train)), reserve)
    labels = data.strata[free]
    return np.concatenate([rng.permutation(free[labels == c])[:count] for c, count in enumerate(counts)])


@dataclass(frozen=True)
class HeldOutEvaluator:
    """Evaluates models on samples held out of training: those are what ``task`` takes for its test set."""

    task: NetworkTask
    batch_size: int

    def __call__(self, w: Tensor) -> dict[str, float]:
        """Return the metrics of a model by name."""
        return self.task.evaluate(w, self.batch_size)


def held_out_evaluator(task: NetworkTask, data: Dataset, held: Ids) -> HeldOutEvaluator | None:
    """Return what evaluates a model of ``task`` on the training samples ``held``; None if there are none."""
    if not len(held):
        return None
    twin = copy.copy(task)
    twin.traces = task.traces  # it evaluates other samples, which are given to what is traced
    x, twin.y_test = task.tensors(data, data.x_train[held], data.y_train[held], task.device)
    twin.test_scaled = x.numel() * task.scaler.dtype.itemsize <= task.resident_bytes
    twin.x_test = task.inputs(x) if twin.test_scaled else x
    # A GPU wants large batches, a CPU such as fit into its caches.
    return HeldOutEvaluator(twin, 2500 if task.device.type == "cuda" else 500)
