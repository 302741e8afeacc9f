"""GPU kernels of the row algebra: sums over rows of any length, in float64, from as few reads as can be.

Columns are cut into parts; a program sums one part of one row, and programs of the same part stand together, so that
all but the first find ``g`` in cache. The parts' sums are added afterwards. Their number depends on the length of a row
alone, so the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers that a program handles at a time, and parts that a row is cut into at most.
BLOCK, PARTS = 1024, 256


def row_sums(x: Tensor, g: Tensor) -> Tensor:
    """Return the products with ``g`` and the squares of all rows, ``g`` being the last, ``[2, m + 1]`` in float64."""
    x, g = _by_rows(x), g.contiguous()
    m, d = x.shape
    parts, share = _cut(d)
    out = torch.empty(parts, 2, m + 1, dtype=torch.float64, device=x.device)
    _row_sums[m + 1, parts](x, x.stride(0), g, out, m, d, SHARE=share, BLOCK=BLOCK, num_warps=4)
    return out.sum(0)


def left_over(x: Tensor, g: Tensor, p: Tensor, near: Tensor) -> Tensor:
    """Return the squares of ``x - p g`` for the rows that are ``near``."""
    x, g = _by_rows(x), g.contiguous()
    m, d = x.shape
    parts, share = _cut(d)
    out = torch.empty(parts, m, dtype=torch.float64, device=x.device)
    flags = near.contiguous().view(torch.uint8)
    _left_over[m, parts](
        x, x.stride(0), g, p.double().contiguous(), flags, out, m, d, SHARE=share, BLOCK=BLOCK, num_warps=4
    )
    return out.sum(0)


def mixed(x: Tensor, c: Tensor, g: Tensor | None, along: Tensor | None) -> Tensor:
    """Return the sum of the rows, each times its ``c``, plus ``along * g``."""
    x = _by_rows(x)
    m, d = x.shape
    out = x.new_empty(d)
    added = g is not None and along is not None
    base = g.contiguous() if g is not None and added else x
    factor = along.double() if along is not None and added else c.double()
    _mixed[(-(-d // BLOCK),)](
        x, x.stride(0), c.double().contiguous(), base, factor, out, m, d, ADDED=added, BLOCK=BLOCK, num_warps=4
    )
    return out


def _by_rows(x: Tensor) -> Tensor:
    """Return the stack with the numbers of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _cut(d: int) -> tuple[int, int]:
    """Return the number of parts of a row of ``d`` numbers, and how many numbers one has, a multiple of ``BLOCK``."""
    blocks = -(-d // BLOCK)
    share = -(-blocks // PARTS)
    return -(-blocks // share), share * BLOCK


@triton.jit
def _row_sums(x, BY_ROW, g, out, M, D, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    """``out[part, 0, row]`` is the product of a part of a row with that of ``g``, ``out[part, 1, row]`` its square."""
    row, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dot = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for first in range(0, SHARE, BLOCK):
        at = part * SHARE + first + tl.arange(0, BLOCK)
        other = tl.load(g + at, mask=at < D, other=0.0).to(tl.float64)
        if row == M:
            dot += other * other
            square += other * other
        else:
            own = tl.load(x + row.to(tl.int64) * BY_ROW + at, mask=at < D, other=0.0).to(tl.float64)
            dot += own * other
            square += own * own
    to = out + part * 2 * (M + 1) + row
    tl.store(to, tl.sum(dot, 0))
    tl.store(to + M + 1, tl.sum(square, 0))


@triton.jit
def _left_over(x, BY_ROW, g, p, near, out, M, D, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    """``out[part, row]`` is the square of a part of ``x - p g``, 0 for a row that is not near."""
    row, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    square = tl.zeros([BLOCK], tl.float64)
    if tl.load(near + row) != 0:
        along = tl.load(p + row)
        for first in range(0, SHARE, BLOCK):
            at = part * SHARE + first + tl.arange(0, BLOCK)
            own = tl.load(x + row.to(tl.int64) * BY_ROW + at, mask=at < D, other=0.0).to(tl.float64)
            left = own - along * tl.load(g + at, mask=at < D, other=0.0).to(tl.float64)
            square += left * left
    tl.store(out + part * M + row, tl.sum(square, 0))


@triton.jit
def _mixed(x, BY_ROW, c, g, along, out, M, D, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """``out`` is the sum of the rows, each times its ``c``, plus ``along * g``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    if ADDED:
        total += tl.load(along) * tl.load(g + at, mask=at < D, other=0.0).to(tl.float64)
    for row in range(0, M):
        own = tl.load(x + tl.cast(row, tl.int64) * BY_ROW + at, mask=at < D, other=0.0).to(tl.float64)
        total += tl.load(c + row) * own
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < D)
