"""What a network measures while it trains: BatchNorm's running mean and variance, and other buffers that change.

Buffers that stay as they are, such as a causal mask, are constants of the network, like frozen parameters.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

#: Layers with a scale and a shift of what they have normalized.
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


class Traits(NamedTuple):
    """What engines and batch plans must know about a network."""

    statistics: tuple[str, ...]  #: names of the buffers that training changes
    mixes_samples: bool  #: whether an output depends on the other samples of its batch, so that padding would count
    smallest_batch: int  #: two if the network cannot be trained on a batch of one sample


def examine(module: nn.Module, x: Tensor) -> Traits:
    """Find out by a trial on a copy; ``x`` holds two samples."""
    buffers = [name for name, _ in module.named_buffers()]
    mixes = any(isinstance(part, _BatchNorm) for part in module.modules())
    if not buffers and not mixes:
        return Traits((), False, 1)
    copied = copy.deepcopy(module).train()
    before = {name: value.clone() for name, value in copied.named_buffers()}
    with torch.no_grad():
        copied(x)
    tracked = {
        f"{name}.{key}".lstrip(".")
        for name, part in copied.named_modules()
        if isinstance(part, _NormBase)
        for key, _ in part.named_buffers(recurse=False)
    }
    after = dict(copied.named_buffers())
    changed = tuple(n for n in buffers if n in tracked or not torch.equal(before[n], after[n]))
    return Traits(changed, mixes, 2 if mixes and _fails_with_one(copied, x[:1]) else 1)


def norm_mask(module: nn.Module) -> dict[str, bool]:
    """Return by name which trainable parameters are scales and shifts of normalization layers."""
    inside = {id(p) for part in module.modules() if isinstance(part, NORMS) for p in part.parameters(recurse=False)}
    return {name: id(p) in inside for name, p in module.named_parameters() if p.requires_grad}


def _fails_with_one(module: nn.Module, x: Tensor) -> bool:
    """Say whether one sample is too few: BatchNorm wants two values per channel."""
    try:
        with torch.no_grad():
            module(x)
    except ValueError:
        return True
    return False
