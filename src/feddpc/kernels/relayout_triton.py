"""GPU kernels that gather numbers of a vector in another order and precision, and put gradients back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def lay_out(w: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``w[order]`` in ``dtype``."""
    out = torch.empty(order.shape, dtype=dtype, device=w.device)
    if len(order):
        _gather[(triton.cdiv(len(order), BLOCK),)](w, order, out, len(order), BLOCK=BLOCK)
    return out


def lay_back(wide: Tensor, rest: Tensor, inverse: Tensor) -> Tensor:
    """Return the numbers of ``wide`` and ``rest``, one after the other, in the order of ``inverse``."""
    out = torch.empty(inverse.shape, dtype=rest.dtype, device=rest.device)
    grid = (triton.cdiv(len(out), BLOCK),)
    _put_back[grid](wide.contiguous(), rest.contiguous(), inverse, out, len(wide), len(out), BLOCK=BLOCK)
    return out


@triton.jit
def _gather(w, order, out, size, BLOCK: tl.constexpr):
    """``out[i] = w[order[i]]``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(order + i, mask=i < size, other=0)
    tl.store(out + i, tl.load(w + at, mask=i < size).to(out.dtype.element_ty), mask=i < size)


@triton.jit
def _put_back(wide, rest, inverse, out, first, size, BLOCK: tl.constexpr):
    """``out[i]`` is a number of ``wide``, or behind ``first`` of them one of ``rest``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(inverse + i, mask=i < size, other=0)
    a = tl.load(wide + at, mask=(i < size) & (at < first), other=0.0).to(out.dtype.element_ty)
    b = tl.load(rest + at - first, mask=(i < size) & (at >= first), other=0.0)
    tl.store(out + i, tl.where(at < first, a, b), mask=i < size)
