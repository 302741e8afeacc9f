"""Which models can be trained, and converting BatchNorm to GroupNorm.

A global model is a vector of parameters. BatchNorm's running statistics are not part of it: they are averaged beside
it, or stay with the clients (:mod:`feddpc.methods.statistics`), and neither is as good as a layer that has none.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from feddpc.checks import check_int
from feddpc.errors import BadInputError


def to_groupnorm(module: nn.Module, groups: int = 2) -> nn.Module:
    """Return a copy in which every BatchNorm, however deep, is a GroupNorm with the same scale, shift and epsilon.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> norm = to_groupnorm(net)[1]
    >>> type(norm).__name__, norm.num_groups, norm.num_channels
    ('GroupNorm', 2, 8)
    """
    check_int("groups", groups, 1)
    holder = nn.ModuleDict({"model": copy.deepcopy(module)})  # so that the module itself may be a BatchNorm
    done: dict[int, nn.Module] = {}  # a layer used in two places stays one layer
    for parent_name, parent in list(holder.named_modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                where = f"{parent_name}.{name}".lstrip(".").removeprefix("model").lstrip(".") or "the model itself"
                if id(child) not in done:
                    done[id(child)] = _convert(child, groups, where)
                parent._modules[name] = done[id(child)]
    return holder["model"]


def check_supported(module: nn.Module, *, statistics: bool = True) -> None:
    """Raise, with the remedy, unless every parameter has a shape and at least one is trained.

    Without ``statistics``, layers that measure some are refused too.
    """
    for name, part in module.named_modules():
        measures = isinstance(part, _BatchNorm) or (isinstance(part, _NormBase) and part.track_running_stats)
        if measures and not statistics:
            raise BadInputError(
                f"layer {name or 'the model itself'!r} is a {type(part).__name__}, whose statistics only the simulator "
                "and the drop-in strategies carry over: convert the model with feddpc.models.to_groupnorm"
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise BadInputError(f"parameter {name!r} has no shape yet: run one batch through the model first")
    if not any(p.requires_grad and p.numel() for p in module.parameters()):
        raise BadInputError("the model has no trainable parameter: give it a layer, or set requires_grad=True")


def _convert(old: _BatchNorm, groups: int, where: str) -> nn.GroupNorm:
    if old.num_features < 1 or old.num_features % groups:
        raise BadInputError(
            f"groups = {groups} does not divide the {old.num_features} channels of layer {where!r}: choose a divisor"
        )
    new = nn.GroupNorm(groups, old.num_features, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias  # the copy's own, with their device, dtype and requires_grad
    return new.train(old.training)
