"""GPU kernels of GroupNorm with what surrounds it: an added residual and a ReLU, forward and backward.

One program computes one group of channels of one image, in the layout in which the image lies: a tile at a time, or
all of it where it fits into one tile, so that it is read once. Statistics and sums are in float32 and have a fixed
order: the same input gives the same bits. Images are ``[nets, n, channels, pixels]``, scales and shifts
``[nets, channels]``; every stride is an argument, so channels may be first or last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: How many numbers a tile has, and up to which size a whole group makes one tile.
TILE, WHOLE = 4096, 16384
#: Images and channels of a tile of what is summed over all images.
ROWS, COLUMNS = 64, 16
#: The widest tile, in channels.
WIDEST = 256


def group_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized images, and mean and inverse deviation of every group."""
    images = x.flatten(3) if x.ndim > 3 else x.unsqueeze(3)
    y = torch.empty_like(images)
    nets, n, channels, pixels = images.shape
    mean = torch.empty(nets, n, groups, dtype=torch.float32, device=x.device)
    inverse = torch.empty_like(mean)
    added = images if residual is None else residual.reshape(images.shape)
    tile = _tile(channels // groups, pixels)
    _forward[(nets * n, groups)](
        *(images, *images.stride()),
        *(added, *added.stride()),
        *(y, *y.stride()),
        *_affine(weight, bias, images),
        *(mean, inverse, eps, n, pixels),
        RESIDUAL=residual is not None,
        RELU=relu,
        **tile,
    )
    return y.view(x.shape), mean, inverse


def group_norm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, inverse: Tensor, weight: Tensor | None, both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the images and, for ``both``, of the residual; and those of scales and shifts.

    ``y``, the result, says where a ReLU let numbers through; None without one.
    """
    images = x.flatten(3) if x.ndim > 3 else x.unsqueeze(3)
    slopes = dy.reshape(images.shape)
    nets, n, channels, pixels = images.shape
    groups = mean.shape[-1]
    dx = torch.empty_like(images)
    through = torch.empty_like(images) if both else dx
    kept = images if y is None else y.reshape(images.shape)
    sums = torch.empty(nets, n, 2, channels, dtype=torch.float32, device=x.device)
    _backward[(nets * n, groups)](
        *(slopes, *slopes.stride()),
        *(images, *images.stride()),
        *(kept, *kept.stride()),
        *(dx, *dx.stride()),
        *(through, *through.stride()),
        *_affine(weight, None, images)[:2],
        *(mean, inverse, sums, n, channels, pixels),
        WEIGHTED=weight is not None,
        RELU=y is not None,
        BOTH=both,
        **_tile(channels // groups, pixels),
    )
    total = torch.empty(nets, 2, channels, dtype=torch.float32, device=x.device)
    _add_up[(nets, triton.cdiv(2 * channels, COLUMNS))](sums, total, n, 2 * channels, ROWS=ROWS, COLUMNS=COLUMNS)
    return dx.view(x.shape), through.view(x.shape) if both else dx.new_empty(nets, 0), total


def _affine(weight: Tensor | None, bias: Tensor | None, unused: Tensor) -> tuple[Tensor | int | bool, ...]:
    """Return what the kernels want to know of scale and shift: where they are, and how far apart those of networks."""
    scale, shift = unused if weight is None else weight, unused if bias is None else bias
    return scale, scale.stride(0), shift, shift.stride(0), weight is not None, bias is not None


def _tile(channels: int, pixels: int) -> dict[str, int | bool]:
    """Return how a group of so many channels and pixels is cut into tiles."""
    wide, long = triton.next_power_of_2(channels), triton.next_power_of_2(pixels)
    whole = wide * long <= WHOLE and wide <= WIDEST
    wide = min(wide, WIDEST)
    long = long if whole else min(long, max(1, TILE // wide))
    return {"WIDTH": channels, "WIDE": wide, "LONG": long, "WHOLE": whole, "num_warps": _warps(wide * long)}


def _warps(size: int) -> int:
    return min(16, max(1, size // 512))


@triton.jit
def _moments(v, inside, count):
    """Return the mean of a tile's ``count`` numbers, and the sum of their squared distances from it."""
    mean = tl.sum(v) / count
    apart = tl.where(inside, v - mean, 0.0)
    return mean, tl.sum(apart * apart)


@triton.jit
def _forward(
    x,
    X_NET,
    X_IMAGE,
    X_CHANNEL,
    X_PIXEL,
    residual,
    R_NET,
    R_IMAGE,
    R_CHANNEL,
    R_PIXEL,
    y,
    Y_NET,
    Y_IMAGE,
    Y_CHANNEL,
    Y_PIXEL,
    weight,
    W_NET,
    bias,
    B_NET,
    WEIGHTED: tl.constexpr,
    SHIFTED: tl.constexpr,
    mean,
    inverse,
    eps,
    N,
    PIXELS,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Normalize one group of one image."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    net, i = image // N, image % N
    x += net * X_NET + i * X_IMAGE + group * WIDTH * X_CHANNEL
    residual += net * R_NET + i * R_IMAGE + group * WIDTH * R_CHANNEL
    y += net * Y_NET + i * Y_IMAGE + group * WIDTH * Y_CHANNEL
    weight += net * W_NET + group * WIDTH
    bias += net * B_NET + group * WIDTH
    p, c = tl.arange(0, LONG)[:, None], tl.arange(0, WIDE)[None, :]
    if WHOLE:
        inside = (p < PIXELS) & (c < WIDTH)
        v = tl.load(x + p * X_PIXEL + c * X_CHANNEL, mask=inside, other=0.0).to(tl.float32)
        middle, squares = _moments(v, inside, 1.0 * WIDTH * PIXELS)
    else:
        middle, squares, seen = 0.0, 0.0, 0.0
        for first in range(0, WIDTH, WIDE):
            for start in range(0, PIXELS, LONG):
                inside = (start + p < PIXELS) & (first + c < WIDTH)
                at = (start + p) * X_PIXEL + (first + c) * X_CHANNEL
                v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
                count = tl.sum(inside.to(tl.float32))
                here, apart = _moments(v, inside, count)
                total = seen + count
                squares += apart + (here - middle) * (here - middle) * (seen * count / total)
                middle += (here - middle) * (count / total)
                seen = total
    scale = 1.0 / tl.sqrt(squares / (1.0 * WIDTH * PIXELS) + eps)
    tl.store(mean + image * tl.num_programs(1) + group, middle)
    tl.store(inverse + image * tl.num_programs(1) + group, scale)
    for first in range(0, WIDTH, WIDE):
        channel = first + c
        w = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) if WEIGHTED else 1.0
        b = tl.load(bias + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) if SHIFTED else 0.0
        for start in range(0, PIXELS, LONG):
            pixel = start + p
            inside = (pixel < PIXELS) & (channel < WIDTH)
            if not WHOLE:
                v = tl.load(x + pixel * X_PIXEL + channel * X_CHANNEL, mask=inside, other=0.0).to(tl.float32)
            out = (v - middle) * scale * w + b
            if RESIDUAL:
                out += tl.load(residual + pixel * R_PIXEL + channel * R_CHANNEL, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                out = tl.where(out < 0, 0.0, out)  # NaN stays NaN
            tl.store(y + pixel * Y_PIXEL + channel * Y_CHANNEL, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slope(dy, at, kept, kept_at, inside, RELU: tl.constexpr):
    """Return the gradient behind the ReLU."""
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        d = tl.where(tl.load(kept + kept_at, mask=inside, other=0.0) > 0, d, 0.0)
    return d


@triton.jit
def _backward(
    dy,
    D_NET,
    D_IMAGE,
    D_CHANNEL,
    D_PIXEL,
    x,
    X_NET,
    X_IMAGE,
    X_CHANNEL,
    X_PIXEL,
    y,
    Y_NET,
    Y_IMAGE,
    Y_CHANNEL,
    Y_PIXEL,
    dx,
    S_NET,
    S_IMAGE,
    S_CHANNEL,
    S_PIXEL,
    through,
    T_NET,
    T_IMAGE,
    T_CHANNEL,
    T_PIXEL,
    weight,
    W_NET,
    mean,
    inverse,
    sums,
    N,
    CHANNELS,
    PIXELS,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    BOTH: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Compute all gradients of one group of one image; those of scale and shift are summed over images later."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    net, i = image // N, image % N
    dy += net * D_NET + i * D_IMAGE + group * WIDTH * D_CHANNEL
    x += net * X_NET + i * X_IMAGE + group * WIDTH * X_CHANNEL
    y += net * Y_NET + i * Y_IMAGE + group * WIDTH * Y_CHANNEL
    dx += net * S_NET + i * S_IMAGE + group * WIDTH * S_CHANNEL
    through += net * T_NET + i * T_IMAGE + group * WIDTH * T_CHANNEL
    weight += net * W_NET + group * WIDTH
    sums += image * 2 * CHANNELS + group * WIDTH
    middle = tl.load(mean + image * tl.num_programs(1) + group)
    scale = tl.load(inverse + image * tl.num_programs(1) + group)
    p, c = tl.arange(0, LONG)[:, None], tl.arange(0, WIDE)[None, :]
    numbers = 1.0 * WIDTH * PIXELS
    if WHOLE:
        inside = (p < PIXELS) & (c < WIDTH)
        w = tl.load(weight + c, mask=c < WIDTH, other=0.0).to(tl.float32) if WEIGHTED else 1.0
        d = _slope(dy, p * D_PIXEL + c * D_CHANNEL, y, p * Y_PIXEL + c * Y_CHANNEL, inside, RELU)
        v = tl.load(x + p * X_PIXEL + c * X_CHANNEL, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (v - middle) * scale, 0.0)
        by_scale, by_shift = tl.sum(d * normal, 0)[None, :], tl.sum(d, 0)[None, :]
        tl.store(sums + c, by_scale, mask=c < WIDTH)
        tl.store(sums + CHANNELS + c, by_shift, mask=c < WIDTH)
        if BOTH:
            tl.store(through + p * T_PIXEL + c * T_CHANNEL, d.to(through.dtype.element_ty), mask=inside)
        out = (d * w - tl.sum(by_shift * w) / numbers - normal * (tl.sum(by_scale * w) / numbers)) * scale
        tl.store(dx + p * S_PIXEL + c * S_CHANNEL, out.to(dx.dtype.element_ty), mask=inside)
    else:
        flat, along = 0.0, 0.0
        for first in range(0, WIDTH, WIDE):
            channel = first + c
            w = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) if WEIGHTED else 1.0
            by_scale, by_shift = tl.zeros([1, WIDE], tl.float32), tl.zeros([1, WIDE], tl.float32)
            for start in range(0, PIXELS, LONG):
                pixel = start + p
                inside = (pixel < PIXELS) & (channel < WIDTH)
                slope_at, kept_at = pixel * D_PIXEL + channel * D_CHANNEL, pixel * Y_PIXEL + channel * Y_CHANNEL
                d = _slope(dy, slope_at, y, kept_at, inside, RELU)
                v = tl.load(x + pixel * X_PIXEL + channel * X_CHANNEL, mask=inside, other=0.0).to(tl.float32)
                by_scale += tl.sum(tl.where(inside, d * (v - middle) * scale, 0.0), 0)[None, :]
                by_shift += tl.sum(d, 0)[None, :]
                if BOTH:
                    to = pixel * T_PIXEL + channel * T_CHANNEL
                    tl.store(through + to, d.to(through.dtype.element_ty), mask=inside)
            tl.store(sums + channel, by_scale, mask=channel < WIDTH)
            tl.store(sums + CHANNELS + channel, by_shift, mask=channel < WIDTH)
            along += tl.sum(by_scale * w) / numbers
            flat += tl.sum(by_shift * w) / numbers
        for first in range(0, WIDTH, WIDE):
            channel = first + c
            w = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32) if WEIGHTED else 1.0
            for start in range(0, PIXELS, LONG):
                pixel = start + p
                inside = (pixel < PIXELS) & (channel < WIDTH)
                slope_at, kept_at = pixel * D_PIXEL + channel * D_CHANNEL, pixel * Y_PIXEL + channel * Y_CHANNEL
                d = _slope(dy, slope_at, y, kept_at, inside, RELU)
                v = tl.load(x + pixel * X_PIXEL + channel * X_CHANNEL, mask=inside, other=0.0).to(tl.float32)
                out = (d * w - flat - (v - middle) * scale * along) * scale
                tl.store(dx + pixel * S_PIXEL + channel * S_CHANNEL, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _add_up(sums, total, N, SIZE, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over the images of a network."""
    net = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, N, ROWS):
        i = first + tl.arange(0, ROWS)
        at = (net * N + i)[:, None] * SIZE + c[None, :]
        part += tl.load(sums + at, mask=(i < N)[:, None] & (c < SIZE)[None, :], other=0.0)
    tl.store(total + net * SIZE + c, tl.sum(part, 0), mask=c < SIZE)
