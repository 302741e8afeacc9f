"""GroupNorm, an added residual and a ReLU as one operation on a GPU, for a whole stack of networks.

torch's own GroupNorm puts the channels of its result apart, so that every convolution behind it changes the layout
twice; it computes in float32 under autocast; and the addition and the ReLU read and write everything once more. With
ResNet18 that took more time than all convolutions. :mod:`feddpc.kernels.group_norm_triton` has the operation for GPUs;
what stands here for a CPU is what the tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from feddpc.kernels.launch import declare, stacks, usable


def fits(x: Tensor) -> bool:
    """Whether the operation can take these images: on a GPU with kernels, in no more than float32."""
    return x.ndim > 1 and x.numel() > 0 and x.dtype in (torch.float32, torch.bfloat16) and usable(x.device)


def normalized(norm: nn.GroupNorm, x: Tensor, residual: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Return ``norm(x)``, plus ``residual`` if given, through a ReLU if asked for.

    >>> norm, x = nn.GroupNorm(2, 4), torch.linspace(-1, 1, 32).view(2, 4, 2, 2)
    >>> torch.equal(normalized(norm, x, x, relu=True), (x + norm(x)).relu())
    True
    """
    own = type(norm).forward is not nn.GroupNorm.forward  # then that has called this, and hooks are called around it
    plain = own or not (norm._forward_hooks or norm._forward_pre_hooks)
    alike = x.ndim > 1 and x.shape[1] == norm.num_channels and (residual is None or residual.shape == x.shape)
    if fits(x) and plain and alike:
        added = None if residual is None else residual.to(x.dtype)[None]
        learned: tuple[Tensor | None, ...] = (norm.weight, norm.bias)
        affine = (None if p is None else p[None] for p in learned)
        arguments = x[None], added, *affine, norm.num_groups, norm.eps, relu
        result: Tensor = _Normalized.apply(*arguments)[0][0]  # type: ignore[no-untyped-call]
        return result
    y: Tensor = nn.GroupNorm.forward(norm, x) if plain else norm(x)
    y = y if residual is None else residual + y
    return y.relu() if relu else y


# The operation, for stacks: images [g, n, channels, ...], scales and shifts [g, channels].

_SIGNATURES = {
    "group_norm": "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int groups, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor)",
    "group_norm_backward": "(Tensor dy, Tensor x, Tensor? y, Tensor mean, Tensor inverse, Tensor? weight, bool both)"
    " -> (Tensor, Tensor, Tensor)",
}
declare(_SIGNATURES, "feddpc.kernels.group_norm_triton")


@torch.library.impl("feddpc::group_norm", "CPU")
def _group_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized images, and mean and inverse deviation of every group."""
    parts = _grouped(x.float() if x.dtype == torch.bfloat16 else x, groups)
    variance, mean = torch.var_mean(parts, -1, correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    y = ((parts - mean) * inverse).view(x.shape)
    y = y if weight is None else y * _by_channel(weight, x)
    y = y if bias is None else y + _by_channel(bias, x)
    y = y if residual is None else y + residual
    y = y.relu() if relu else y
    return torch.empty_like(x).copy_(y), mean[..., 0], inverse[..., 0]


@torch.library.impl("feddpc::group_norm_backward", "CPU")
def _group_norm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, inverse: Tensor, weight: Tensor | None, both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of images and residual, and those of scales and shifts, ``[g, 2, channels]``."""
    through = (dy if y is None else torch.where(y > 0, dy, 0)).to(mean.dtype)
    groups = mean.shape[-1]
    normal = (_grouped(x.to(mean.dtype), groups) - mean[..., None]) * inverse[..., None]
    slope = _grouped(through if weight is None else through * _by_channel(weight, x), groups)
    along = (slope * normal).mean(-1, keepdim=True)
    dx = ((slope - slope.mean(-1, keepdim=True) - normal * along) * inverse[..., None]).view(x.shape)
    rest = [1, *range(3, x.ndim)]
    sums = torch.stack([(through * normal.view(x.shape)).sum(rest), through.sum(rest)], 1)
    given = torch.empty_like(x).copy_(through) if both else x.new_empty(len(x), 0)
    return torch.empty_like(x).copy_(dx), given, sums


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return ``x`` as ``[g, n, groups, numbers of a group]``."""
    return x.reshape(*x.shape[:2], groups, -1)


def _by_channel(weight: Tensor, x: Tensor) -> Tensor:
    return weight.view(len(weight), 1, -1, *(1 for _ in x.shape[3:]))


# What compilers and function transforms want to know.


@torch.library.register_fake("feddpc::group_norm")  # type: ignore[untyped-decorator]
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(*x.shape[:2], groups, dtype=_statistics(x))
    return torch.empty_like(x), mean, torch.empty_like(mean)


@torch.library.register_fake("feddpc::group_norm_backward")  # type: ignore[untyped-decorator]
def _(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, inverse: Tensor, weight: Tensor | None, both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    given = torch.empty_like(x) if both else x.new_empty(len(x), 0)
    return torch.empty_like(x), given, mean.new_empty(x.shape[0], 2, x.shape[2])


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Normalized(torch.autograd.Function):
    """The operation with its gradients, for function transforms as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.feddpc.group_norm(
            x, residual, weight, bias, groups, eps, relu
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, residual, weight, bias, _, _, relu = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.added, ctx.shift = residual is not None, None if bias is None else bias.dtype
        ctx.save_for_backward(x, output[0] if relu else None, *output[1:], weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, y, mean, inverse, weight = ctx.saved_tensors
        both = ctx.added and y is not None
        dx, given, sums = torch.ops.feddpc.group_norm_backward(dy, x, y, mean, inverse, weight, both)
        residual = (given if both else dy) if ctx.added else None
        scale = None if weight is None else sums[:, 0].to(weight.dtype)
        return dx, residual, scale, None if ctx.shift is None else sums[:, 1].to(ctx.shift), None, None, None


for _name in _SIGNATURES:
    torch.library.register_vmap(f"feddpc::{_name}", stacks(getattr(torch.ops.feddpc, _name)))
