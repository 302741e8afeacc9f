"""Row algebra in few reads of the stack, on a GPU: three operations, accumulated in float64.

Written with torch's own operations, FedDPC's server step on a GPU goes over a stack five times, and four times through
a copy of it in float64; with ResNet18 that took a fifth of a round. :mod:`feddpc.kernels.row_sums_triton` has the
operations for GPUs, :mod:`feddpc.methods._algebra` uses them there; what stands here for a CPU is what the tests
compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddpc.kernels.launch import declare, usable

_SIGNATURES = {
    "row_sums": "(Tensor x, Tensor g) -> Tensor",
    "left_over": "(Tensor x, Tensor g, Tensor p, Tensor near) -> Tensor",
    "mixed": "(Tensor x, Tensor c, Tensor? g, Tensor? along) -> Tensor",
}
declare(_SIGNATURES, "feddpc.kernels.row_sums_triton")


def fits(x_md: Tensor) -> bool:
    """Whether these operations can be used: on a GPU with kernels, outside of ``vmap``."""
    plain = x_md.dtype in (torch.float32, torch.float64) and x_md.numel() > 0
    return plain and usable(x_md.device) and not torch._C._functorch.is_functorch_wrapped_tensor(x_md)


def row_sums(x_md: Tensor, g_d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``<x_j, g>`` and ``<x_j, x_j>`` for every row, and ``<g, g>``, from one read of the stack."""
    dots, squares = torch.ops.feddpc.row_sums(x_md, g_d)
    return dots[:-1], squares[:-1], squares[-1]


def left_over(x_md: Tensor, g_d: Tensor, p_m: Tensor, near_m: Tensor) -> Tensor:
    """Return ``|x_j - p_j g|^2`` for the rows that are ``near``, and 0 for others, which are not even read."""
    result: Tensor = torch.ops.feddpc.left_over(x_md, g_d, p_m, near_m)
    return result


def mixed(x_md: Tensor, c_m: Tensor, g_d: Tensor | None = None, along: Tensor | None = None) -> Tensor:
    """Return ``sum_j c_j x_j``, plus ``along * g`` if given, in the stack's own type."""
    result: Tensor = torch.ops.feddpc.mixed(x_md, c_m, g_d, along)
    return result


@torch.library.impl("feddpc::row_sums", "CPU")
def _row_sums(x: Tensor, g: Tensor) -> Tensor:
    rows = torch.cat([x, g[None]]).double()
    return torch.stack([rows @ g.double(), rows.square().sum(1)])


@torch.library.impl("feddpc::left_over", "CPU")
def _left_over(x: Tensor, g: Tensor, p: Tensor, near: Tensor) -> Tensor:
    r = x.double() - p[:, None] * g.double()
    return torch.where(near, r.square().sum(1), 0.0)


@torch.library.impl("feddpc::mixed", "CPU")
def _mixed(x: Tensor, c: Tensor, g: Tensor | None, along: Tensor | None) -> Tensor:
    total = c.double() @ x.double()
    return (total if g is None or along is None else total + along.double() * g.double()).to(x.dtype)


@torch.library.register_fake("feddpc::row_sums")  # type: ignore[untyped-decorator]
def _(x: Tensor, g: Tensor) -> Tensor:
    return x.new_empty(2, len(x) + 1, dtype=torch.float64)


@torch.library.register_fake("feddpc::left_over")  # type: ignore[untyped-decorator]
def _(x: Tensor, g: Tensor, p: Tensor, near: Tensor) -> Tensor:
    return torch.empty_like(p)


@torch.library.register_fake("feddpc::mixed")  # type: ignore[untyped-decorator]
def _(x: Tensor, c: Tensor, g: Tensor | None, along: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[1])
