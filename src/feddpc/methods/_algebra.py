"""Row algebra on the stack of a cohort, accumulated in float64.

Shape suffixes: ``_d`` one vector, ``_m`` one number per client, ``_md`` one vector per client.

At 11 million float32 parameters a float32 dot can be off by 5e-5, enough to turn the length of a residual into
nonsense. So sums run in float64. One concession to speed: on a CPU, where converting long float32 rows would cost more
than reading them, pieces are summed in float32, pairwise, and the pieces' sums in float64. That is good to 3e-7 at
worst (terms of one sign), usually 1e-9, and rows that need more digits are measured again. On a GPU the sums are
those of :mod:`feddpc.kernels.row_sums`, float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from feddpc.kernels import row_sums

#: Columns that are converted to float64 at a time.
BLOCK = 1 << 16
#: Rows of this length are long.
LONG = 1 << 19
#: How many numbers of long rows are handled at a time, so that they stay in cache between two operations.
CACHED = 1 << 20
#: How many squares of a long row are summed in float32 before float64 takes over.
TILE = 1 << 8


def row_dots(x_md: Tensor, g_d: Tensor) -> Tensor:
    """Return ``<x_j, g>`` for every row, in float64."""
    if _has_kernels(x_md):
        return row_sums.row_sums(x_md, g_d)[0]
    if _long(x_md):
        dot_m, x2_m = _tiled_sums(x_md, g_d)
        if _held(x2_m, x_md) and _held(square(g_d), x_md):
            return dot_m
    return _over_blocks(x_md, lambda x, b: x @ g_d[b].double())


def row_squares(x_md: Tensor) -> Tensor:
    """Return ``<x_j, x_j>`` for every row, in float64."""
    if _has_kernels(x_md):
        return row_sums.row_sums(x_md, x_md[0])[1]
    if _long(x_md):
        _, x2_m = _tiled_sums(x_md, None)
        if _held(x2_m, x_md):
            return x2_m
    return _over_blocks(x_md, lambda x, _: torch.linalg.vecdot(x, x))


def row_distances(x_md: Tensor, y_d: Tensor) -> Tensor:
    """Return ``|x_j - y|`` for every row, in float64, without the cancellation of ``|x|^2 - 2 <x, y> + |y|^2``.

    >>> row_distances(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0.0, 0.0]))
    tensor([5., 0.], dtype=torch.float64)
    """
    return _over_blocks(x_md, lambda x, b: (x - y_d[b].double()).square().sum(1)).sqrt()


def dot(x_d: Tensor, y_d: Tensor) -> Tensor:
    """Return ``<x, y>`` in float64."""
    return row_dots(x_d[None], y_d)[0]


def square(x_d: Tensor) -> Tensor:
    """Return ``<x, x>`` in float64.

    >>> float(square(torch.tensor([3.0, 4.0])))
    25.0
    """
    return row_squares(x_d[None])[0]


def weighted_sum(c_m: Tensor, x_md: Tensor) -> Tensor:
    """Return ``sum_j c_j x_j`` in the stack's own type.

    >>> weighted_sum(torch.tensor([0.5, 2.0]), torch.tensor([[2.0, 4.0], [1.0, 0.0]]))
    tensor([3., 2.])
    """
    if _has_kernels(x_md):
        return row_sums.mixed(x_md, c_m)
    return add_rows(_zeros(x_md, x_md.dtype), c_m, x_md)


def add_rows(total_d: Tensor, c_m: Tensor, x_md: Tensor) -> Tensor:
    """Add ``sum_j c_j x_j`` to ``total_d`` in place, and return it."""
    if not _long(x_md):
        return total_d.add_(c_m.to(x_md.dtype) @ x_md)
    for b in _columns(x_md, CACHED):
        _add_long_rows(total_d[b], c_m.tolist(), x_md[:, b])
    return total_d


def _add_long_rows(total: Tensor, factors: list[float], x_mb: Tensor) -> None:
    """Add multiples of rows; with plain numbers as factors a row is one fused multiply-add."""
    for factor, x in zip(factors, x_mb, strict=True):
        total.add_(x, alpha=factor)


def exact_sum(x_md: Tensor, c_m: Tensor | None = None) -> Tensor:
    """Return ``sum_j x_j``, or ``sum_j c_j x_j``, in float64, for running sums that must not drift.

    >>> exact_sum(torch.tensor([[1.0], [2.0]]), torch.tensor([0.5, 0.25]))
    tensor([1.], dtype=torch.float64)
    """
    if c_m is None:
        return x_md.sum(0, dtype=torch.float64)
    total = _zeros(x_md, torch.float64)
    for c, x in zip(c_m.double(), x_md, strict=True):  # a row at a time: a float64 copy of the stack would be large
        total.addcmul_(x.double(), c)
    return total


def safe_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and 0 where ``b`` is 0.

    >>> safe_ratio(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    usable = b != 0
    return torch.where(usable, a, 0.0) / torch.where(usable, b, 1.0)


def project_out_(x_d: Tensor, g_d: Tensor, g2: Tensor | None = None) -> Tensor:
    """Subtract from ``x``, in place, its projection on ``g`` (nothing when ``g`` is zero).

    ``g2`` is ``<g, g>`` if it is known already.

    >>> project_out_(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]))
    tensor([0., 4.])
    """
    p = safe_ratio(dot(x_d, g_d), square(g_d) if g2 is None else g2)
    return _add_multiple_(x_d, g_d, -p)


class Residuals(NamedTuple):
    """The projection of every row on ``g``, and what is left: ``r_j = x_j - p_j g``, orthogonal to it. In float64."""

    p_m: Tensor  #: ``<x_j, g> / <g, g>``, 0 when ``g`` is zero
    x2_m: Tensor  #: ``|x_j|^2``
    r2_m: Tensor  #: ``|r_j|^2``
    cosine_m: Tensor  #: ``cos(x_j, g)``, 0 when either is zero
    g2: Tensor  #: ``|g|^2``
    clean: bool  #: whether a sum of residuals is orthogonal to ``g`` without being projected once more


def residuals(x_md: Tensor, g_d: Tensor, *, g2: Tensor | None = None, look: bool | None = None) -> Residuals:
    """Decompose every row along and across ``g``; ``g2`` is ``<g, g>`` if it is known already.

    ``|r|^2 = |x|^2 - <x, g>^2 / <g, g>`` cancels when ``x`` is nearly parallel to ``g``: the sums' relative error is
    divided by sin^2. Rows too close to ``g`` for that are measured again, by an explicit sweep in float64. With
    ``look=False``, and on an accelerator without kernels of its own, all rows are swept: looking whether any needs it
    would wait for the device, and cannot be vectorised.

    >>> residuals(torch.tensor([[3.0, 4.0], [5.0, 0.0]]), torch.tensor([2.0, 0.0])).r2_m
    tensor([16.,  0.], dtype=torch.float64)
    """
    if look is None and _has_kernels(x_md):
        return _in_few_reads(x_md, g_d)
    look = x_md.device.type == "cpu" if look is None else look
    g2 = square(g_d) if g2 is None else g2
    tiled = look and _long(x_md) and _held(g2, x_md)
    if tiled:
        dot_m, x2_m = _tiled_sums(x_md, g_d)
        tiled = _held(x2_m, x_md)
    if not tiled:
        dot_m = _over_blocks(x_md, lambda x, b: x @ g_d[b].double())
        x2_m = _over_blocks(x_md, lambda x, _: torch.linalg.vecdot(x, x))
    p_m = safe_ratio(dot_m, g2)
    r2_m = (x2_m - dot_m * p_m).clamp(min=0)
    near_m = r2_m < (0.5 if tiled else 1e-4) * x2_m
    any_near = not look or bool(near_m.any())
    if not look:
        p_m, r2_m = (torch.where(near_m, new, old) for new, old in zip(_sweep(x_md, g_d), (p_m, r2_m), strict=True))
    elif any_near:
        p_m[near_m], r2_m[near_m] = _sweep(x_md[near_m], g_d)
    return Residuals(p_m, x2_m, r2_m, safe_ratio(dot_m, (x2_m * g2).sqrt()), g2, clean=tiled and not any_near)


def residual_sum(c_m: Tensor, p_m: Tensor, x_md: Tensor, g_d: Tensor, *, into: Tensor | None = None) -> Tensor:
    """Return ``sum_j c_j (x_j - p_j g)``, added to ``into`` if given, without storing the residuals."""
    along = -(c_m * p_m).sum()
    if into is None and _has_kernels(x_md):
        return row_sums.mixed(x_md, c_m, g_d, along)
    if into is not None:
        return add_rows(_add_multiple_(into, g_d, along), c_m, x_md)
    if not _long(x_md):
        return add_rows(_multiple(g_d, along), c_m, x_md)
    total = torch.empty_like(g_d)
    for b in _columns(x_md, CACHED):  # a block of the sum is finished while it is in cache
        _multiple(g_d[b], along, out=total[b])
        _add_long_rows(total[b], c_m.tolist(), x_md[:, b])
    return total


def descended(y_d: Tensor, lr: float, g_d: Tensor) -> Tensor:
    """Return ``y - lr g`` in the memory of ``g``, in pieces that stay in cache.

    >>> descended(torch.tensor([3.0, 4.0]), 0.5, torch.tensor([2.0, 0.0]))
    tensor([2., 4.])
    """
    for b in _columns(y_d[None], CACHED if y_d.device.type == "cpu" else len(y_d)):
        torch.sub(y_d[b], g_d[b].mul_(lr), out=g_d[b])
    return g_d


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return finite numbers in ``dtype``; those beyond its largest become the largest, not infinite.

    >>> saturated(torch.tensor([1e300, -2.0], dtype=torch.float64), torch.float32)
    tensor([ 3.4028e+38, -2.0000e+00])
    """
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _multiple(g_d: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``factor * g``; ``factor``, in float64, may be beyond the range of ``g``."""
    rounded = factor.to(g_d.dtype)
    if _overflows(rounded):
        product = saturated(factor * g_d.double(), g_d.dtype)
        return product if out is None else out.copy_(product)
    return torch.mul(g_d, rounded, out=out)


def _add_multiple_(x_d: Tensor, g_d: Tensor, factor: Tensor) -> Tensor:
    """Add ``factor * g`` to ``x`` in place; ``factor``, in float64, may be beyond the range of ``g``."""
    rounded = factor.to(g_d.dtype)
    return x_d.add_(_multiple(g_d, factor)) if _overflows(rounded) else x_d.addcmul_(g_d, rounded)


def _overflows(factor: Tensor) -> bool:
    """Whether a factor on a CPU is infinite; elsewhere that is not looked at, since it would wait for the device."""
    return factor.device.type == "cpu" and not bool(factor.isfinite())


def _in_few_reads(x_md: Tensor, g_d: Tensor) -> Residuals:
    """Decompose every row from one read of all, and a second one of those that are close to ``g``.

    Sums of float32 rows are made in float64 and rounded once: nothing is left along ``g`` that rounding would not bring
    back.
    """
    dot_m, x2_m, g2 = row_sums.row_sums(x_md, g_d)
    p_m = safe_ratio(dot_m, g2)
    r2_m = (x2_m - dot_m * p_m).clamp(min=0)
    near_m = r2_m < 1e-4 * x2_m
    r2_m = torch.where(near_m, row_sums.left_over(x_md, g_d, p_m, near_m), r2_m)
    return Residuals(p_m, x2_m, r2_m, safe_ratio(dot_m, (x2_m * g2).sqrt()), g2, clean=x_md.dtype == torch.float32)


def _sweep(x_md: Tensor, g_d: Tensor) -> tuple[Tensor, Tensor]:
    """Measure ``p`` and ``|r|^2`` from the residuals themselves, in float64."""
    g2 = _over_blocks(g_d[None], lambda g, _: torch.linalg.vecdot(g, g))
    p_m = safe_ratio(_over_blocks(x_md, lambda x, b: x @ g_d[b].double()), g2)

    def left(x: Tensor, b: slice) -> Tensor:
        r: Tensor = x - p_m[:, None] * g_d[b].double()
        return r.square().sum(1)

    return p_m, _over_blocks(x_md, left)


def _zeros(x_md: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros like a row of a stack, which may have none."""
    return torch.zeros(x_md.shape[1:], dtype=dtype, device=x_md.device)


def _has_kernels(x_md: Tensor) -> bool:
    """Whether the sums can run in kernels of our own."""
    return x_md.is_cuda and len(x_md) > 0 and row_sums.fits(x_md)


def _long(x_md: Tensor) -> bool:
    """Whether there are rows, so long that float32 is summed as such within a block."""
    return x_md.device.type == "cpu" and x_md.dtype == torch.float32 and x_md.shape[1] >= LONG and len(x_md) > 0


def _columns(x_md: Tensor, size: int) -> list[slice]:
    return [slice(i, i + size) for i in range(0, x_md.shape[1], size)]


def _held(squares: Tensor, x_md: Tensor) -> bool:
    """Whether float32 could hold the terms of these sums of squares: none vanished, none overflowed."""
    return bool(((x_md.shape[1] * 1e-30 < squares) & (squares < 1e30)).all())


def _over_blocks(x_md: Tensor, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Sum ``part`` over the columns, which are converted to float64 one block at a time."""
    total_m = torch.zeros(len(x_md), dtype=torch.float64, device=x_md.device)
    for b in _columns(x_md, BLOCK if x_md.device.type == "cpu" else 1 << 22):
        total_m = total_m + part(x_md[:, b].double(), b)
    return total_m


def _tiled_sums(x_md: Tensor, g_d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dots with ``g``, if given, and squares of the rows: float32 within blocks and tiles, float64 across."""
    m, whole = len(x_md), x_md.shape[1] // TILE * TILE
    size = CACHED // m // TILE * TILE or TILE
    products = x_md.new_empty(m, size)  # one buffer for all blocks: it stays in cache
    dots, norms = x_md.new_empty(-(-whole // size), m), x_md.new_empty(m, whole // TILE)
    for k, i in enumerate(range(0, whole, size)):
        b = slice(i, min(i + size, whole))
        x = x_md[:, b]
        if g_d is not None:
            torch.sum(torch.mul(x, g_d[b], out=products[:, : x.shape[1]]), 1, out=dots[k])
        tiles = slice(b.start // TILE, b.stop // TILE)
        torch.linalg.vector_norm(x.reshape(m, -1, TILE), dim=2, out=norms[:, tiles])
    rest = x_md[:, whole:].double()
    x2_m = norms.double().square_().sum(1) + rest.square().sum(1)
    if g_d is None:
        return torch.zeros_like(x2_m), x2_m
    return dots.double().sum(0) + rest @ g_d[whole:].double(), x2_m
