"""Convolutions of few channels with pooling, on a GPU: one operation for a whole stack of networks.

No kernel of the usual libraries fits a convolution of three or six channels, least of all with other weights for every
client of a stack. Here the four places of which pooling takes the largest are computed together, as a product of the
window that they see with a matrix that holds the kernel at four places. :mod:`feddpc.kernels.conv_pool_triton` has it
for GPUs; what stands here for a CPU is what the tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.kernels.launch import declare, stacks

#: Up to so many channels on either side, this beats a convolution.
FEW = 16


def fits(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether the channels are few, and kernel and image make whole blocks of 2x2 pixels."""
    assert not isinstance(conv.padding, str)
    sides = zip(x.shape[-2:], conv.padding, conv.kernel_size, strict=True)
    few = max(conv.in_channels, conv.out_channels) <= FEW and x.ndim == 4 and x.dtype != torch.float64
    return few and all(k % 2 and not n % 2 and n + 2 * p > k for n, p, k in sides)


def pooled(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the convolution of ``x``, with 2x2 max-pooling.

    >>> conv, x = nn.Conv2d(3, 6, 5), torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
    >>> torch.allclose(pooled(conv, x), F.max_pool2d(conv(x), 2), atol=1e-6)
    True
    """
    assert not isinstance(conv.padding, str)
    weight, bias = conv.weight, conv.bias
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, weight))
    down, right = conv.padding
    x = F.pad(x, (right, right, down, down)) if down or right else x
    high, wide = conv.kernel_size
    stacked = x[None], at_four_places(weight)[None]
    y: Tensor = _PooledProduct.apply(*stacked, high, wide)[0][0]  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


def at_four_places(weight: Tensor) -> Tensor:
    """Return the matrix from a window to the kernel's four places in it, row by row: ``[window, 4 * outputs]``."""
    four = torch.stack([F.pad(weight, (j, 1 - j, i, 1 - i)) for i in (0, 1) for j in (0, 1)])
    return four.flatten(2).flatten(0, 1).t()


# The operation, for stacks: images [g, n, channels, rows, columns], matrices [g, window, 4 * outputs].

_SIGNATURES = {
    "pooled_product": "(Tensor x, Tensor matrix, int high, int wide) -> (Tensor, Tensor)",
    "pooled_by_matrix": "(Tensor dy, Tensor chosen, Tensor x, int high, int wide) -> Tensor",
    "pooled_by_image": "(Tensor dy, Tensor chosen, Tensor m, int high, int wide, int rows, int columns) -> Tensor",
}
declare(_SIGNATURES, "feddpc.kernels.conv_pool_triton")


@torch.library.impl("feddpc::pooled_product", "CPU")
def _pooled_product(x: Tensor, matrix: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """Return the largest of four products at every place, and which of the four it was."""
    four = _windows(x, high, wide) @ matrix[:, None]
    largest, chosen = four.view(*four.shape[:-1], 4, -1).max(-2)
    shape = pooled_shape(x, matrix, high, wide)
    y, chosen = (t.transpose(-1, -2).reshape(shape).contiguous() for t in (largest, chosen.to(torch.uint8)))
    return y, chosen


@torch.library.impl("feddpc::pooled_by_matrix", "CPU")
def _pooled_by_matrix(dy: Tensor, chosen: Tensor, x: Tensor, high: int, wide: int) -> Tensor:
    """Return the gradient of the matrix."""
    return (_windows(x, high, wide).transpose(-1, -2) @ _spread(dy, chosen)).sum(1)


@torch.library.impl("feddpc::pooled_by_image", "CPU")
def _pooled_by_image(
    dy: Tensor, chosen: Tensor, matrix: Tensor, high: int, wide: int, rows: int, columns: int
) -> Tensor:
    """Return the gradient of the images, which have so many rows and columns."""
    windows = _spread(dy, chosen) @ matrix[:, None].transpose(-1, -2)
    images = F.fold(windows.flatten(0, 1).transpose(-1, -2), (rows, columns), (high + 1, wide + 1), stride=2)
    return images.view(*dy.shape[:2], *images.shape[1:])


def _windows(x: Tensor, high: int, wide: int) -> Tensor:
    """Return what every place sees, ``[g, n, places, window]``."""
    seen = F.unfold(x.flatten(0, 1), (high + 1, wide + 1), stride=2).transpose(-1, -2)
    return seen.view(*x.shape[:2], *seen.shape[1:])


def _spread(dy: Tensor, chosen: Tensor) -> Tensor:
    """Return the gradient of the four products, ``[g, n, places, 4 * outputs]``: zero but for the chosen one."""
    four = [torch.where(chosen == quarter, dy, 0) for quarter in range(4)]
    return torch.cat(four, 2).flatten(3).transpose(-1, -2)


def pooled_shape(x: Tensor, matrix: Tensor, high: int, wide: int) -> tuple[int, ...]:
    """Return the shape of the pooled output."""
    *stack, _, rows, columns = x.shape
    return *stack, matrix.shape[-1] // 4, (rows - high + 1) // 2, (columns - wide + 1) // 2


# What compilers and function transforms want to know.


@torch.library.register_fake("feddpc::pooled_product")  # type: ignore[untyped-decorator]
def _(x: Tensor, matrix: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    y = x.new_empty(pooled_shape(x, matrix, high, wide))
    return y, torch.empty_like(y, dtype=torch.uint8)


@torch.library.register_fake("feddpc::pooled_by_matrix")  # type: ignore[untyped-decorator]
def _(dy: Tensor, chosen: Tensor, x: Tensor, high: int, wide: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2] * (high + 1) * (wide + 1), 4 * dy.shape[2])


@torch.library.register_fake("feddpc::pooled_by_image")  # type: ignore[untyped-decorator]
def _(dy: Tensor, chosen: Tensor, matrix: Tensor, high: int, wide: int, rows: int, columns: int) -> Tensor:
    return dy.new_empty(*dy.shape[:2], matrix.shape[1] // ((high + 1) * (wide + 1)), rows, columns)


class _PooledProduct(torch.autograd.Function):
    """The operation with its gradients, for function transforms as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, matrix: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.feddpc.pooled_product(x, matrix, high, wide)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, matrix, ctx.high, ctx.wide = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, matrix, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, Tensor, None, None]:
        x, matrix, chosen = ctx.saved_tensors
        ops, size = torch.ops.feddpc, (ctx.high, ctx.wide)
        dx = ops.pooled_by_image(dy, chosen, matrix, *size, *x.shape[-2:]) if ctx.needs_input_grad[0] else None
        return dx, ops.pooled_by_matrix(dy, chosen, x, *size), None, None


for _name in _SIGNATURES:
    torch.library.register_vmap(f"feddpc::{_name}", stacks(getattr(torch.ops.feddpc, _name)))
