"""Losses by name: functions of outputs and targets that return one value per sample, or per sample and token."""

from __future__ import annotations

import inspect

import torch.nn.functional as F
from torch import Tensor

from feddpc.data.array_checks import IGNORED
from feddpc.registry import Registry


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the scores of classes, of each sample or of each token; targets of -100 cost nothing."""
    if targets.ndim == 1:
        return F.cross_entropy(outputs, targets, reduction="none")
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, averaged over the numbers of a sample."""
    return _per_sample((outputs - targets) ** 2)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, averaged over the numbers of a sample."""
    return _per_sample((outputs - targets).abs())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss: squared up to an error of 1, absolute beyond, averaged over the numbers of a sample."""
    return _per_sample(F.huber_loss(outputs, targets, reduction="none"))


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each label, averaged over the labels of a sample."""
    return _per_sample(F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"))


def _per_sample(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.mean(-1)


#: Kinds of targets that each named loss is defined for.
TARGETS = {
    "cross-entropy": ("classes", "tokens"),
    "squared": ("floats",),
    "absolute": ("floats",),
    "huber": ("floats",),
    "logistic": ("multihot",),
}
LOSSES: Registry[Tensor] = Registry(
    "loss",
    {
        "cross-entropy": cross_entropy,
        "squared": squared,
        "absolute": absolute,
        "huber": huber,
        "logistic": logistic,
    },
    accepts=inspect.isfunction,
)
