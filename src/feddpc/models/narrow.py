"""A part of a network at less than its full width: the same weights, but only the first channels of every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.errors import BadInputError

#: Layers without weights that treat every channel alike.
_WIDTHLESS = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Identity)


@runtime_checkable
class Narrowable(Protocol):
    """A module that knows by itself how to run at a reduced width."""

    def narrowed(self, h: Tensor, width: float) -> Tensor:
        """Run on the first channels, which is all that ``h`` holds."""


def reduced(channels: int, width: float) -> int:
    """Return how many of ``channels`` remain at ``width``, at least one.

    >>> reduced(512, 0.25), reduced(6, 0.25), reduced(1, 0.25)
    (128, 2, 1)
    """
    return max(1, round(channels * width))


def narrowed(module: nn.Module, h: Tensor, width: float) -> Tensor:
    """Apply ``module`` at ``width`` to ``h``, which holds only the first channels of the usual input.

    >>> narrowed(nn.Linear(8, 12), torch.zeros(3, 4), 0.5).shape
    torch.Size([3, 6])
    """
    if isinstance(module, Narrowable):
        return module.narrowed(h, width)
    if isinstance(module, nn.Sequential):
        for layer in module:
            h = narrowed(layer, h, width)
        return h
    if isinstance(module, _WIDTHLESS):
        same: Tensor = module(h)
        return same
    if isinstance(module, nn.GroupNorm):
        c = h.shape[1]
        return torch.group_norm(h, module.num_groups, _first(module.weight, c), _first(module.bias, c), module.eps)
    if isinstance(module, nn.Linear):
        out = reduced(module.out_features, width)
        return F.linear(h, module.weight[:out, : h.shape[1]], _first(module.bias, out))
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        out = reduced(module.out_channels, width)
        maps: Tensor = module._conv_forward(h, module.weight[:out, : h.shape[1]], _first(module.bias, out))
        return maps
    raise BadInputError(
        f"a {type(module).__name__} has no reduced width here: give it a narrowed(h, width) method, or build the last "
        "stage of Conv2d (groups=1), Linear, GroupNorm, ReLU and pooling layers"
    )


def misfit(layers: Iterable[tuple[str, nn.Module]], width: float) -> str | None:
    """Say which of the named ``layers`` cannot run at ``width``, and why; None if all can."""
    for name, layer in layers:
        if isinstance(layer, nn.GroupNorm) and reduced(layer.num_channels, width) % layer.num_groups:
            return (
                f"the {layer.num_groups} groups of layer {name!r} do not divide its reduced width, "
                f"{reduced(layer.num_channels, width)} of {layer.num_channels} channels"
            )
    return None


def _first(values: Tensor | None, count: int) -> Tensor | None:
    return None if values is None else values[:count]
