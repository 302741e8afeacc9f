"""Trying out a task before round 1: one or two samples go through network, transform and loss, which name mistakes."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.models.traits import examine
from feddpc.tasks.augmentation import Transform, uniforms_of
from feddpc.tasks.base import forked
from feddpc.tasks.losses import LOSSES

if TYPE_CHECKING:
    from feddpc.tasks.network import NetworkTask


def try_out(task: NetworkTask, classes: int) -> bool:
    """Send a sample through the module; say whether it draws random numbers, or what is wrong with it."""
    first = torch.arange(2, device=task.x.device).clamp(max=len(task.x) - 1)
    pair = task.inputs(task.x[first])
    if task.transform is not None:
        _check_transform(task.transform, pair[:1])
    with torch.no_grad(), forked(task.x.device) as generator:
        try:
            task.traits = examine(task.module, pair)
            task.flat.statistics = task.traits.statistics
            task.first_statistics = task.flat.read_statistics()  # a run changes those in the module
            trial = copy.deepcopy(task.module) if task.traits.statistics else task.module
            before = generator.get_state()
            output = trial(pair if task.traits.mixes_samples else pair[:1])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape = "x".join(str(n) for n in pair.shape[1:])
            kind = (
                ""
                if pair.is_floating_point()
                else (
                    f" and type {str(pair.dtype).removeprefix('torch.')} (tokens; images are uint8 and tables float32)"
                )
            )
            raise BadInputError(f"the model cannot take a sample of shape {shape}{kind}: {error}") from None
        moved = not torch.equal(before, generator.get_state())
    if not isinstance(output, Tensor):
        raise BadInputError(f"the model must give one tensor, but gives {type(output).__name__}")
    output = output[:1]
    task.width = output.shape[-1] if output.ndim > 1 else 1
    task.check_outputs(output, classes)
    _check_loss(task, output)
    return moved


def _check_transform(transform: Transform, x: Tensor) -> None:
    """Raise unless the transform keeps the shape and type of a batch."""
    uniforms = uniforms_of(transform)
    try:
        after = transform(x, torch.full((len(x), uniforms), 0.5, device=x.device))
    except Exception as error:
        raise BadInputError(
            f"transform fails for inputs {tuple(x.shape)} and {uniforms} random numbers per sample: {error}"
        ) from None
    if (getattr(after, "shape", None), getattr(after, "dtype", None)) != (x.shape, x.dtype):
        raise BadInputError(f"transform must return inputs {tuple(x.shape)} of type {x.dtype}, like those it gets")


def _check_loss(task: NetworkTask, output: Tensor) -> None:
    """Raise unless the loss of every sample is a finite value of its own."""
    name = task.loss_name
    # The same sample several times, and not as often as there are outputs: one that fits by chance is no loss.
    n = 3 if task.width == 2 else 2
    leaf = output.to(task.dtype).requires_grad_()
    targets = task.y[:1].expand(n, *task.y.shape[1:])
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # torch's, of shapes that do not fit: they are refused below
            outputs = leaf.expand(n, *output.shape[1:]).clone()
            values = task.losses(outputs, targets)
    except Exception as error:
        raise BadInputError(
            f"loss {name} fails for outputs {(n, *output.shape[1:])} and targets {tuple(targets.shape)}: {error}; "
            "choose a loss for these targets"
        ) from None
    shape = getattr(values, "shape", None)
    tokens = targets.ndim == 2 and not targets.is_floating_point()
    if shape is None or tuple(shape) not in ((n,), tuple(targets.shape) if tokens else (n,)):
        got = type(values).__name__ if shape is None else tuple(shape)
        wanted = "one value per sample and token, [n, T], or per sample, [n]" if tokens else "one value per sample, [n]"
        raise BadInputError(
            f'loss {name} must return {wanted}, but returns {got} for {n} samples: use reduction="none", and '
            "average over what belongs to one sample; a mean over samples cannot be corrected for padding"
        )
    if not values.requires_grad:
        raise BadInputError(
            f"loss {name} returns {values.dtype} values without a gradient: compute it from the outputs by operations "
            "that torch can differentiate, without detach, argmax or item"
        )
    task.loss_per_token = values.ndim > 1
    if task.sample_loss not in LOSSES.entries.values() and not bool(values.isfinite().all()):
        bad = values[~values.isfinite()][0].item()
        raise BadInputError(f"loss {name} is {bad} for the first sample at the initial model: make it finite")
