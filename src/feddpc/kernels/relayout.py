"""From one vector of parameters to weights as matrix units want them, in one pass, and back with the gradient.

Convolutions on matrix units want the channels of a pixel together, and under autocast rounded numbers. Done weight by
weight, that is four small kernels per layer and step, forward and backward. :mod:`feddpc.kernels.relayout_triton` has
it for GPUs; what stands here for a CPU is what the tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from feddpc.kernels.launch import declare

_SIGNATURES = {
    "lay_out": "(Tensor w, Tensor order, ScalarType dtype) -> Tensor",
    "lay_back": "(Tensor wide, Tensor rest, Tensor inverse) -> Tensor",
}
declare(_SIGNATURES, "feddpc.kernels.relayout_triton")


def lay_out(w: Tensor, order: Tensor, rest: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``w[order]`` in ``dtype``, and ``w[rest]``; together they hold every number once, ``inverse`` says where.

    >>> order, rest = torch.tensor([2, 0]), torch.tensor([1])
    >>> lay_out(torch.tensor([5.0, 6.0, 7.0]), order, rest, torch.tensor([1, 2, 0]), torch.bfloat16)
    (tensor([7., 5.], dtype=torch.bfloat16), tensor([6.]))
    """
    result: tuple[Tensor, Tensor] = _LaidOut.apply(w, order, rest, inverse, dtype)  # type: ignore[no-untyped-call]
    return result


class _LaidOut(torch.autograd.Function):
    """The operation with its gradient."""

    @staticmethod
    def forward(w: Tensor, order: Tensor, rest: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ops.feddpc.lay_out(w, order, dtype), torch.ops.feddpc.lay_out(w, rest, w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx: Any, wide: Tensor, rest: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return torch.ops.feddpc.lay_back(wide, rest, inverse), None, None, None, None


@torch.library.impl("feddpc::lay_out", "CPU")
def _lay_out(w: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    return w[order].to(dtype)


@torch.library.impl("feddpc::lay_back", "CPU")
def _lay_back(wide: Tensor, rest: Tensor, inverse: Tensor) -> Tensor:
    return torch.cat([wide.to(rest.dtype), rest])[inverse]


@torch.library.register_fake("feddpc::lay_out")  # type: ignore[untyped-decorator]
def _(w: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(order, dtype=dtype)


@torch.library.register_fake("feddpc::lay_back")  # type: ignore[untyped-decorator]
def _(wide: Tensor, rest: Tensor, inverse: Tensor) -> Tensor:
    return torch.empty_like(inverse, dtype=rest.dtype)
