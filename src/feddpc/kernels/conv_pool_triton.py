"""GPU kernels of one operation: the convolution of few channels with 2x2 max-pooling, for a stack of networks.

A place of the pooled output sees a window of ``(kernel + 1)`` pixels a side, and the product of that window with a
matrix ``[window, 4 * outputs]`` gives the four numbers of which pooling takes the largest. The kernels take windows
straight from the images, so none is ever written to memory. Three of them: the pooled values, and the gradients of the
matrix and of the images. Sums have a fixed order: the same input gives the same bits. ``PADDED`` is a power of two that
is not less than the number of outputs, or of numbers in a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from feddpc.kernels.conv_pool import pooled_shape

#: Sums over all places of a batch are cut into so many, to keep all of a GPU busy.
SHARES = 32
#: Float32 on matrix units as three products of rounded parts: measured, no less exact than one in float32, and faster.
FLOAT32 = "tf32x3"
#: How much one program computes: places, and terms of a sum at a time.
FIT = {
    "product": {"PLACES": 128, "DEEP": 32, "num_warps": 4},
    "by matrix": {"PLACES": 32, "DEEP": 128, "num_warps": 4},
    "by image": {"PLACES": 128, "DEEP": 32, "num_warps": 4},
}


def works(device: torch.device) -> bool:
    """Compile and run the least that there is."""
    one = torch.zeros(1, device=device)
    _count[(1,)](one)
    return one.item() == 1.0


def pooled_product(x: Tensor, matrix: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """Return the largest of four products at every place, and which of the four it was."""
    matrix = matrix.contiguous()
    y = x.new_empty(pooled_shape(x, matrix, high, wide))
    chosen = torch.empty_like(y, dtype=torch.uint8)
    g, n, outputs, rows, columns = y.shape
    fit = FIT["product"] | {"PADDED": _power(outputs)}
    grid = (-(-n * rows * columns // fit["PLACES"]), g)
    _pooled[grid](
        x, *x.stride(), matrix, y, chosen, *x.shape[1:3], rows, columns, *_constants(outputs, high, wide), **fit
    )
    return y, chosen


def pooled_by_matrix(dy: Tensor, chosen: Tensor, x: Tensor, high: int, wide: int) -> Tensor:
    """Return the gradient of the matrix."""
    dy, chosen = dy.contiguous(), chosen.contiguous()
    g, n, outputs, rows, columns = dy.shape
    window = x.shape[2] * (high + 1) * (wide + 1)
    fit = FIT["by matrix"] | {"PADDED": _power(outputs)}
    share = -(-n * rows * columns // (SHARES * fit["PLACES"])) * fit["PLACES"]
    parts = torch.empty(g, SHARES, window, 4 * outputs, dtype=torch.float32, device=x.device)
    grid = (SHARES, -(-window // fit["DEEP"]), g)
    sizes = *x.shape[1:3], rows, columns, share
    _by_matrix[grid](x, *x.stride(), dy, chosen, parts, *sizes, *_constants(outputs, high, wide), **fit)
    return parts.sum(1).to(x.dtype)


def pooled_by_image(
    dy: Tensor, chosen: Tensor, matrix: Tensor, high: int, wide: int, rows: int, columns: int
) -> Tensor:
    """Return the gradient of the images, which have so many rows and columns."""
    dy, chosen, matrix = dy.contiguous(), chosen.contiguous(), matrix.contiguous()
    g, n, outputs, *pooled = dy.shape
    dx = dy.new_empty(g, n, matrix.shape[1] // ((high + 1) * (wide + 1)), rows, columns)
    fit = FIT["by image"] | {"PADDED": max(16, _power(4 * dx.shape[2]))}
    grid = (-(-n * (rows // 2) * (columns // 2) // fit["PLACES"]), g)
    _by_image[grid](matrix, dy, chosen, dx, *dx.shape[1:], *pooled, *_constants(outputs, high, wide), **fit)
    return dx


def _constants(outputs: int, high: int, wide: int) -> tuple[str | int, ...]:
    rounding = "tf32" if torch.backends.cuda.matmul.allow_tf32 else FLOAT32
    return rounding, outputs, high + 1, wide + 1


def _power(n: int) -> int:
    """Return the least power of two that is not less; four of it make a product that a GPU can do."""
    return max(4, 1 << (n - 1).bit_length())


@triton.jit
def _count(total):
    """Add one."""
    tl.store(total, tl.load(total) + 1)


@triton.jit
def _pooled(
    x,
    BY_NET,
    BY_IMAGE,
    BY_CHANNEL: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    matrix,
    y,
    chosen,
    N,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    DEEP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``y[g, n, o, r, c]`` is the largest of four numbers, ``chosen`` which one it was."""
    g = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = ROWS * COLUMNS
    window: tl.constexpr = C * HIGH * WIDE
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = at < N * size
    image, place = at // size, at % size
    corner = x + g * BY_NET + image.to(tl.int64) * BY_IMAGE
    corner += 2 * (place // COLUMNS) * BY_ROW + 2 * (place % COLUMNS) * BY_COLUMN
    out = tl.arange(0, 4 * PADDED)
    quarter, o = out // PADDED, out % PADDED
    total = tl.zeros([PLACES, 4 * PADDED], tl.float32)
    for first in range(0, window, DEEP):
        k = first + tl.arange(0, DEEP)
        pixel = (k // (HIGH * WIDE)) * BY_CHANNEL + (k // WIDE % HIGH) * BY_ROW + k % WIDE * BY_COLUMN
        seen = tl.load(corner[:, None] + pixel[None, :], mask=inside[:, None] & (k < window)[None, :], other=0.0)
        weight = tl.load(
            matrix + (g * window + k)[:, None] * (4 * OUTPUTS) + (quarter * OUTPUTS + o)[None, :],
            mask=(k < window)[:, None] & (o < OUTPUTS)[None, :],
            other=0.0,
        )
        total = tl.dot(seen, weight, total, input_precision=ROUNDING)
    four = tl.reshape(total, [PLACES, 4, PADDED])
    largest, which = tl.max(four, 1, return_indices=True)
    poison = tl.sum(four, 1)  # a comparison would lose a NaN
    largest = tl.where(poison == poison, largest, poison)
    o = tl.arange(0, PADDED)
    to = ((g * N + image)[:, None] * OUTPUTS + o[None, :]) * size + place[:, None]
    mask = inside[:, None] & (o < OUTPUTS)[None, :]
    tl.store(y + to, largest.to(y.dtype.element_ty), mask=mask)
    tl.store(chosen + to, which.to(tl.uint8), mask=mask)


@triton.jit
def _by_matrix(
    x,
    BY_NET,
    BY_IMAGE,
    BY_CHANNEL: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    dy,
    chosen,
    parts,
    N,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARE: tl.constexpr,
    ROUNDING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    DEEP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``parts[g, s, k, :]``: the gradient of the matrix summed over the ``s``-th ``SHARE`` of all places."""
    s, g = tl.program_id(0), tl.program_id(2).to(tl.int64)
    size: tl.constexpr = ROWS * COLUMNS
    window: tl.constexpr = C * HIGH * WIDE
    k = tl.program_id(1) * DEEP + tl.arange(0, DEEP)
    pixel = (k // (HIGH * WIDE)) * BY_CHANNEL + (k // WIDE % HIGH) * BY_ROW + k % WIDE * BY_COLUMN
    out = tl.arange(0, 4 * PADDED)
    quarter, o = out // PADDED, out % PADDED
    total = tl.zeros([DEEP, 4 * PADDED], tl.float32)
    for first in range(0, SHARE, PLACES):
        at = s * SHARE + first + tl.arange(0, PLACES)
        inside = at < N * size
        image, place = at // size, at % size
        corner = g * BY_NET + image.to(tl.int64) * BY_IMAGE
        corner += 2 * (place // COLUMNS) * BY_ROW + 2 * (place % COLUMNS) * BY_COLUMN
        seen = tl.load(x + pixel[:, None] + corner[None, :], mask=(k < window)[:, None] & inside[None, :], other=0.0)
        one = ((g * N + image)[:, None] * OUTPUTS + o[None, :]) * size + place[:, None]
        mask = inside[:, None] & (o < OUTPUTS)[None, :]
        mine = tl.load(chosen + one, mask=mask, other=255).to(tl.int32) == quarter[None, :]
        slope = tl.load(dy + one, mask=mask & mine, other=0.0)
        total = tl.dot(seen, slope, total, input_precision=ROUNDING)
    to = ((g * tl.num_programs(0) + s) * window + k)[:, None] * (4 * OUTPUTS) + (quarter * OUTPUTS + o)[None, :]
    tl.store(parts + to, total, mask=(k < window)[:, None] & (o < OUTPUTS)[None, :])


@triton.jit
def _by_image(
    matrix,
    dy,
    chosen,
    dx,
    N,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    DEEP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``dx``, a block of 2x2 pixels and all channels at a time: the windows that hold a block start at few places."""
    g = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = ROWS * COLUMNS
    window: tl.constexpr = C * HIGH * WIDE
    blocks: tl.constexpr = (H // 2) * (W // 2)
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = at < N * blocks
    image, block = at // blocks, at % blocks
    down, right = block // (W // 2), block % (W // 2)
    out = tl.arange(0, PADDED)  # channel, row and column in the block
    c, i, j = out // 4, out // 2 % 2, out % 2
    depth: tl.constexpr = (HIGH // 2) * (WIDE // 2) * 4 * OUTPUTS
    total = tl.zeros([PLACES, PADDED], tl.float32)
    for first in range(0, depth, DEEP):
        k = first + tl.arange(0, DEEP)
        o, quarter = k % OUTPUTS, k // OUTPUTS % 4
        b, a = k // (4 * OUTPUTS) % (WIDE // 2), k // (4 * OUTPUTS) // (WIDE // 2)
        row, column = down[:, None] - a[None, :], right[:, None] - b[None, :]
        there = (row >= 0) & (row < ROWS) & (column >= 0) & (column < COLUMNS)
        mask = there & inside[:, None] & (k < depth)[None, :]
        one = ((g * N + image)[:, None] * OUTPUTS + o[None, :]) * size + row * COLUMNS + column
        mine = tl.load(chosen + one, mask=mask, other=255).to(tl.int32) == quarter[None, :]
        slope = tl.load(dy + one, mask=mask & mine, other=0.0)
        pixel = (c[None, :] * HIGH + 2 * a[:, None] + i[None, :]) * WIDE + 2 * b[:, None] + j[None, :]
        weight = tl.load(
            matrix + (g * window + pixel) * (4 * OUTPUTS) + (quarter * OUTPUTS + o)[:, None],
            mask=(k < depth)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        total = tl.dot(slope, weight, total, input_precision=ROUNDING)
    to = ((g * N + image)[:, None] * C + c[None, :]) * H * W
    to += (2 * down[:, None] + i[None, :]) * W + 2 * right[:, None] + j[None, :]
    tl.store(dx + to, total.to(dx.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])
