"""Row algebra on the stack of a cohort, accumulated in float64.

Shape suffixes: ``_d`` one vector, ``_m`` one number a client, ``_md`` one vector a client. Dots and norms are exact to
float64 whatever the stack's type: at 11 million float32 parameters a float32 dot is off by up to 5e-5, enough to turn
the length of a residual into nonsense.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Columns handled at a time on a CPU: ten float64 rows of it stay in a core's cache.
BLOCK = 1 << 16


def _blocks(d: int, device: torch.device) -> list[slice]:
    size = BLOCK if device.type == "cpu" else max(d, 1)
    return [slice(i, min(i + size, d)) for i in range(0, d, size)]


def row_dots(x_md: Tensor, g_d: Tensor) -> Tensor:
    """Return ``<x_j, g>`` for every row, in float64."""
    return sum((x_md[:, b].double() @ g_d[b].double() for b in _blocks(len(g_d), g_d.device)), _zeros(x_md))


def row_squares(x_md: Tensor) -> Tensor:
    """Return ``<x_j, x_j>`` for every row, in float64."""
    total = _zeros(x_md)
    for b in _blocks(x_md.shape[1], x_md.device):
        block = x_md[:, b].double()
        total = total + torch.linalg.vecdot(block, block)
    return total


def square(x_d: Tensor) -> Tensor:
    """Return ``<x, x>`` in float64.

    >>> float(square(torch.tensor([3.0, 4.0])))
    25.0
    """
    return row_squares(x_d[None])[0]


def dot(x_d: Tensor, y_d: Tensor) -> Tensor:
    """Return ``<x, y>`` in float64."""
    return row_dots(x_d[None], y_d)[0]


def row_norms(x_md: Tensor) -> Tensor:
    """Return the Euclidean norm of every row, in float64."""
    return row_squares(x_md).sqrt()


def weighted_sum(c_m: Tensor, x_md: Tensor) -> Tensor:
    """Return ``sum_j c_j x_j`` in the stack's own type."""
    return c_m.to(x_md.dtype) @ x_md


def exact_sum(x_md: Tensor) -> Tensor:
    """Return ``sum_j x_j`` in float64, for running sums that must not drift."""
    return x_md.sum(0, dtype=torch.float64)


def safe_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and 0 where ``b`` is 0.

    >>> safe_ratio(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    usable = b != 0
    return torch.where(usable, a, 0.0) / torch.where(usable, b, 1.0)


def project_out(x_d: Tensor, g_d: Tensor) -> Tensor:
    """Return ``x`` less its projection on ``g`` (``x`` itself when ``g`` is zero).

    >>> project_out(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]))
    tensor([0., 4.])
    """
    p = safe_ratio(dot(x_d, g_d), square(g_d))
    return x_d - p.to(x_d.dtype) * g_d


class Residuals(NamedTuple):
    """How a stack of vectors lies to one vector ``g``: ``r_j = x_j - p_j g`` is orthogonal to it. All in float64."""

    p_m: Tensor  #: ``<x_j, g> / <g, g>``, 0 when ``g`` is zero
    x2_m: Tensor  #: ``|x_j|^2``
    r2_m: Tensor  #: ``|r_j|^2``
    cosine_m: Tensor  #: ``cos(x_j, g)``, 0 when either is zero


def residuals(x_md: Tensor, g_d: Tensor, *, sweep: bool | None = None) -> Residuals:
    """Decompose every row along and across ``g``.

    ``|r|^2 = |x|^2 - <x, g>^2 / <g, g>`` cancels when ``x`` is nearly parallel to ``g``: its relative error is about
    1e-13 / sin^2. Rows below sin = 0.01 are therefore measured by an explicit sweep. ``sweep`` decides without looking
    whether there are any: a look waits for the device, and cannot be vectorised.

    >>> residuals(torch.tensor([[3.0, 4.0], [5.0, 0.0]]), torch.tensor([2.0, 0.0])).r2_m
    tensor([16.,  0.], dtype=torch.float64)
    """
    dot_m, x2_m, g2 = _zeros(x_md), _zeros(x_md), _zeros(x_md[:1])[0]
    for b in _blocks(len(g_d), g_d.device):
        x, g = x_md[:, b].double(), g_d[b].double()
        dot_m, x2_m, g2 = dot_m + x @ g, x2_m + torch.linalg.vecdot(x, x), g2 + torch.linalg.vecdot(g, g)
    p_m = safe_ratio(dot_m, g2)
    r2_m = (x2_m - dot_m * p_m).clamp(min=0)
    narrow_m = r2_m < 1e-4 * x2_m
    if sweep is None:
        sweep = x_md.is_cuda or bool(narrow_m.any())
    if sweep:
        swept_m = _zeros(x_md)
        for b in _blocks(len(g_d), g_d.device):
            r = x_md[:, b].double() - p_m[:, None] * g_d[b].double()
            swept_m = swept_m + torch.linalg.vecdot(r, r)
        r2_m = torch.where(narrow_m, swept_m, r2_m)
    return Residuals(p_m, x2_m, r2_m, safe_ratio(dot_m, (x2_m * g2).sqrt()))


def residual_sum(c_m: Tensor, p_m: Tensor, x_md: Tensor, g_d: Tensor, *, into: Tensor | None = None) -> Tensor:
    """Return ``sum_j c_j (x_j - p_j g)``, added to ``into`` if given, without storing the residuals."""
    total_d = torch.zeros_like(g_d) if into is None else into
    shift = (c_m * p_m).sum().to(g_d.dtype)
    c_m = c_m.to(g_d.dtype)
    for b in _blocks(len(g_d), g_d.device):
        total_d[b] += c_m @ x_md[:, b] - shift * g_d[b]
    return total_d


def _zeros(x_md: Tensor) -> Tensor:
    return torch.zeros(len(x_md), dtype=torch.float64, device=x_md.device)
