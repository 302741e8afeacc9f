"""The kinds of tasks: classification, regression, several labels per sample, and the next token of a sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.registry import Registry
from feddpc.tasks.losses import cross_entropy
from feddpc.tasks.network import NetworkTask


class Classification(NetworkTask):
    """One class per sample, by cross-entropy."""

    name: ClassVar[str] = "classification"
    target: ClassVar[str] = "classes"
    usual_loss: ClassVar[str] = "cross-entropy"
    measured: ClassVar[tuple[str, ...]] = ("accuracy",)

    def loss_total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of some test samples."""
        own = type(self).sample_losses is not NetworkTask.sample_losses
        if own or self.sample_loss is not cross_entropy:
            return super().loss_total(outputs, targets)
        return F.cross_entropy(outputs, targets, reduction="sum")

    def check_outputs(self, output: Tensor, classes: int) -> None:
        """Raise unless there is a score for each class."""
        if output.ndim != 2 or output.shape[1] < classes:
            first = int(self.y.min())
            hint = f"; labels begin at {first}, but classes count from 0, and class 0 has no sample" if first else ""
            raise BadInputError(
                f"the model must give [samples, {classes}] scores for {classes} classes, but gives "
                f"{tuple(output.shape)}{hint}"
            )


class Regression(NetworkTask):
    """One or several real numbers per sample, by the squared error, averaged over the numbers of a sample."""

    name: ClassVar[str] = "regression"
    target: ClassVar[str] = "floats"
    usual_loss: ClassVar[str] = "squared"
    measured: ClassVar[tuple[str, ...]] = ("mse", "mae", "r2")

    def check_outputs(self, output: Tensor, classes: int) -> None:
        """Raise unless outputs have the shape of the targets."""
        shape = tuple(self.y.shape[1:])
        if tuple(self.aligned(output, self.y[:1]).shape[1:]) != shape:
            wanted = ", ".join(["samples", *map(str, shape)])
            also = " or [samples, 1]" if not shape else ""
            raise BadInputError(
                f"the model must give [{wanted}]{also} for targets of that shape, but gives {tuple(output.shape)}"
            )


class MultiLabel(NetworkTask):
    """Several yes/no labels per sample, by the cross-entropy of each label, averaged over labels."""

    name: ClassVar[str] = "multilabel"
    target: ClassVar[str] = "multihot"
    usual_loss: ClassVar[str] = "logistic"
    measured: ClassVar[tuple[str, ...]] = ("f1", "accuracy")

    def check_outputs(self, output: Tensor, classes: int) -> None:
        """Raise unless there is a score for each label."""
        if output.ndim != 2 or output.shape[1] != classes:
            raise BadInputError(
                f"the model must give [samples, {classes}] scores for {classes} labels, but gives {tuple(output.shape)}"
            )


class NextToken(NetworkTask):
    """The next token at every place of a sequence, by cross-entropy; targets of -100 do not count."""

    name: ClassVar[str] = "next-token"
    target: ClassVar[str] = "tokens"
    usual_loss: ClassVar[str] = "cross-entropy"
    measured: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity")

    def check_outputs(self, output: Tensor, classes: int) -> None:
        """Raise unless there are scores of all tokens at every place."""
        length = self.y.shape[1]
        if output.ndim != 3 or output.shape[1] != length or output.shape[2] < classes:
            raise BadInputError(
                f"the model must give [samples, {length}, {classes}] scores for {length} tokens out of {classes}, but "
                f"gives {tuple(output.shape)}"
            )


def is_task(thing: object) -> bool:
    """Say whether ``thing`` is a class of tasks."""
    return isinstance(thing, type) and issubclass(thing, NetworkTask)


TASKS: Registry[Any] = Registry(
    "task", {kind.name: kind for kind in (Classification, Regression, MultiLabel, NextToken)}, accepts=is_task
)
#: The task for each kind of targets, unless another is asked for.
BY_TARGET = {kind.target: kind.name for kind in (Classification, Regression, MultiLabel, NextToken)}
