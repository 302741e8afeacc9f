"""FedDPC's streaming form, whose server holds one update at a time; a federation feeds it as replies arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddpc.methods._algebra import residual_sum, residuals, safe_ratio, square
from feddpc.methods.base import State, Step

if TYPE_CHECKING:
    from feddpc.methods._feddpc_forms import FedDPCForms


class Stream:
    """FedDPC's server fed one update at a time: it holds g, an accumulator and the present update.

    >>> from feddpc.methods.feddpc import FedDPC
    >>> stream = Stream(FedDPC(lam=1.0), torch.tensor([1.0, 0.0]))
    >>> for D in torch.tensor([[3.0, 4.0], [0.0, 2.0]]):
    ...     stream.add(D)
    >>> stream.result()[0]
    tensor([0.0000, 6.5000])
    """

    def __init__(self, rule: FedDPCForms, g: Tensor) -> None:
        self.rule, self.g = rule, g
        self.total, self.g2 = torch.zeros_like(g), square(g)
        self.weight = torch.zeros((), dtype=torch.float64, device=g.device)
        self.looks: list[tuple[Tensor, ...]] = []

    def add(self, D_d: Tensor, weight: Tensor | float = 1.0) -> None:
        """Take in one client's update, which may be forgotten afterwards."""
        look = residuals(D_d[None], self.g, g2=self.g2)
        p_1, s_1, guarded_1 = self.rule.scales(look)
        residual_sum(weight * s_1, p_1, D_d[None], self.g, into=self.total)
        counts = (~guarded_1[0]).double() if self.rule.guard == "exclude" else 1.0
        self.weight = self.weight + weight * counts
        self.looks.append((s_1, look.cosine_m, look.x2_m, guarded_1))

    def step(self, server_lr: float, client_lr: float = 1.0) -> Step:
        """Return the server's step along Delta_t."""
        mean, notes = self.result(client_lr)
        delta = self.rule.accelerated(mean, self.g)
        return Step(delta, rate=server_lr, server={"delta": delta}, notes=notes)

    def result(self, client_lr: float = 1.0) -> tuple[Tensor, State]:
        """Return the weighted mean of all v_j over ``client_lr``, and the round's diagnostics."""
        self.total *= safe_ratio(torch.ones_like(self.weight), self.weight * client_lr).to(self.total.dtype)
        notes = self.rule.notes(*(torch.cat(parts) for parts in zip(*self.looks, strict=True))) if self.looks else {}
        return self.rule.clean(self.total, self.g, self.g2), notes
