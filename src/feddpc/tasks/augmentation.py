"""Changes of training inputs: shifted and mirrored images, and transforms of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddpc.checks import check_int
from feddpc.registry import Registry

#: Changes the inputs of a training batch; the second tensor has uniform numbers in [0, 1) for each sample, ``[n, u]``.
Transform = Callable[[Tensor, Tensor], Tensor]
#: Transforms of the user's own, in files.
TRANSFORMS: Registry[Any] = Registry("transform", {}, accepts=inspect.isfunction)


def uniforms_of(transform: Transform | None) -> int:
    """Return how many random numbers per sample a transform asks for with its attribute ``uniforms``; usually 4."""
    if transform is None:
        return 0
    return max(1, check_int("uniforms of the transform", getattr(transform, "uniforms", 4), 0))


def crop_and_flip(x: Tensor, draws: Tensor, shift: int) -> Tensor:
    """Shift every image by up to ``shift`` pixels over a border of zeros and mirror it, as ``draws`` says.

    ``draws[:, 0]`` and ``draws[:, 1]`` are the crop's corner in the image padded by ``shift`` on every side,
    ``draws[:, 2]`` is 1 for a mirrored image.
    """
    *_, height, width = x.shape
    padded = F.pad(x, (shift, shift, shift, shift))
    draws = draws.to(torch.int64)
    rows = torch.arange(height, device=x.device) + draws[:, 0:1]
    columns = torch.arange(width, device=x.device)
    columns = torch.where(draws[:, 2:3] == 1, width - 1 - columns, columns) + draws[:, 1:2]
    images = torch.arange(len(x), device=x.device)[:, None, None, None]
    channels = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]
