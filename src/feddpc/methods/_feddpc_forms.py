"""What stands behind FedDPC's four lines: the guard, residuals that are never stored, and the client-side form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddpc.methods._algebra import (
    Residuals,
    project_out_,
    residual_sum,
    residuals,
    safe_ratio,
    saturated,
    weighted_sum,
)
from feddpc.methods._feddpc_stream import Stream
from feddpc.methods.base import ClientContext, Cohort, Method, State, Step

#: What makes a result of one process that of all, as `Cohort.across` does.
Across = Callable[[Tensor], Tensor]


def alone(x: Tensor) -> Tensor:
    """Return ``x``: there is one process."""
    return x


class Scales(NamedTuple):
    """Per client: the multiple of g to subtract, the factor of the residual, and whether the client is guarded."""

    p_m: Tensor
    s_m: Tensor
    guarded_m: Tensor


class ScaledResiduals:
    """The stack ``v_j = s_j (x_j - p_j g)``: averaged in two reads of ``x`` or made row by row, never stored."""

    def __init__(self, x_md: Tensor, g_d: Tensor, look: Residuals, scales: Scales, steps_m: Tensor | None) -> None:
        self.x_md, self.g_d, self.look, self.scales, self.steps_m = x_md, g_d, look, scales, steps_m

    def __iter__(self) -> Iterator[Tensor]:
        """Return one row per client; a finite update that is scaled beyond the largest number is cut there."""
        factor_m = self.scales.s_m if self.steps_m is None else self.scales.s_m / self.steps_m
        for x, p, s in zip(self.x_md, self.scales.p_m, factor_m, strict=True):
            v = scaled(x, self.g_d, p, s)
            if not bool(v.isfinite().all()):
                v = saturated(scaled(x.double(), self.g_d.double(), p, s), x.dtype)
            yield v

    def mean(self, weights: Tensor, client_lr: float | Tensor) -> Tensor:
        """Return ``sum_j weights_j v_j / client_lr``; it is orthogonal to g up to rounding only if ``look.clean``."""
        shrink = 1 / client_lr if self.steps_m is None else 1 / (self.steps_m * client_lr)
        return residual_sum(weights * self.scales.s_m * shrink, self.scales.p_m, self.x_md, self.g_d)


def scaled(x: Tensor, g: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """Return ``v = s (x - p g)``."""
    return s.to(x.dtype) * (x - p.to(x.dtype) * g)


@dataclass(frozen=True, kw_only=True)
class FedDPCForms(Method, ABC):
    """FedDPC without its algorithm: hyper-parameters, guard, and the client-side and streaming forms."""

    lam: float = 1.0
    projection: bool = True
    scaling: bool = True
    tau: float = 1e-6
    guard: Literal["zero", "exclude", "soft", "keep"] = "zero"
    max_scale: float = 0.0
    form: Literal["matrix", "streaming", "client"] = "matrix"
    normalize_by_steps: bool = False
    momentum: float = 0.0

    def __post_init__(self) -> None:
        self.require(self.lam >= -1, "lam", "lam >= -1, below which updates are reversed")
        self.require(0 < self.tau < 1, "tau", "0 < tau < 1")
        self.require(0 <= self.momentum < 1, "momentum", "0 <= momentum < 1")
        bounded = self.max_scale == 0 or self.max_scale > self.lam + 1
        self.require(bounded, "max_scale", "above lam + 1, the factor of an update orthogonal to g; or 0, no bound")
        self.require(self.projection or not self.scaling, "scaling", "scaling without projection is not defined")

    def guarded(self, look: Residuals, scale_m: Tensor) -> Scales:
        """Bound the factors, and treat updates that are parallel to g as ``guard`` says."""
        D_m, r_m = look.x2_m.sqrt(), look.r2_m.sqrt()
        if not self.projection:
            return Scales(torch.zeros_like(D_m), torch.ones_like(D_m), torch.zeros_like(D_m, dtype=torch.bool))
        guarded_m = (r_m <= self.tau * D_m) & (D_m > 0)
        s_m = scale_m if self.scaling else torch.ones_like(D_m)
        s_m = s_m.clamp(max=self.max_scale) if self.max_scale and self.scaling else s_m
        if self.guard == "soft":
            return Scales(look.p_m, s_m, guarded_m)
        if self.guard == "keep":
            unprojected = self.lam + 1 if self.scaling else 1.0
            s_m = torch.where(guarded_m, unprojected, s_m)
            return Scales(torch.where(guarded_m, 0.0, look.p_m), s_m, guarded_m)
        return Scales(look.p_m, torch.where(guarded_m, 0.0, s_m), guarded_m)

    @abstractmethod
    def scales(self, r: Residuals) -> Scales:
        """Return the factor of every residual, guarded."""

    def direction(self, D_md: Tensor, g: Tensor, weights: Tensor, client_lr: float = 1.0) -> tuple[Tensor, State]:
        """Return the mean of all v_j of a stack with these weights, and the round's diagnostics."""
        look = residuals(D_md, g)
        scales = self.scales(look)
        delta = self.mean(ScaledResiduals(D_md, g, look, scales, None), g, weights, client_lr)
        return delta, self.diagnostics(look, scales)

    @property
    def needs_only_sums(self) -> bool:  # type: ignore[override]
        """To exclude clients, it must first be known who is left; the streaming form adds up by itself."""
        return self.guard != "exclude" and self.form != "streaming"

    def mean(
        self, v: ScaledResiduals | Tensor, g: Tensor, weights: Tensor, client_lr: float | Tensor, across: Across = alone
    ) -> Tensor:
        """Return the mean of all v_j over ``client_lr``, orthogonal to g; ``across`` adds up over processes."""
        if isinstance(v, Tensor):  # rows that a robust rule, privacy or clients have made
            self.check_rule()
            return self.clean(across(weighted_sum(weights / client_lr, v)), g)
        if self.guard == "exclude":
            weights = torch.where(v.scales.guarded_m, 0.0, weights)
            weights = safe_ratio(weights, weights.sum())
        delta = across(v.mean(weights, client_lr))
        return delta if v.look.clean else self.clean(delta, g, v.look.g2)

    def check_rule(self) -> None:
        """A robust rule chooses among clients itself, so that none can be left out after it."""
        self.require(self.guard != "exclude", "guard", "zero, soft or keep with a robust rule")

    def clean(self, delta: Tensor, g: Tensor, g2: Tensor | None = None) -> Tensor:
        """Orthogonalize once more, in place: twice is enough."""
        return project_out_(delta, g, g2) if self.projection and self.guard != "keep" else delta

    def accelerated(self, mean: Tensor, g: Tensor) -> Tensor:
        """Return Delta_t, the mean of all v_j with the momentum of g."""
        return torch.add(mean, g, alpha=self.momentum) if self.momentum else mean

    def diagnostics(self, look: Residuals, scales: Scales, gathered: Across = alone) -> State:
        """Return what is reported of a round; ``gathered`` brings the numbers of all processes together."""
        return self.notes(*map(gathered, (scales.s_m, look.cosine_m, look.x2_m, scales.guarded_m)))

    def notes(self, s_m: Tensor, cosine_m: Tensor, x2_m: Tensor, guarded_m: Tensor) -> State:
        """Return mean scale, mean cosine and the numbers of guarded and capped clients."""
        counts_m = ((x2_m > 0) & ~guarded_m).double()
        mean_scale = safe_ratio((s_m * counts_m).sum(), counts_m.sum())
        capped = (counts_m * (s_m >= self.max_scale)).sum() if self.max_scale else torch.zeros_like(mean_scale)
        return {"mean_scale": mean_scale, "mean_cosine": cosine_m.mean(), "guarded": guarded_m.sum(), "capped": capped}

    # The client-side form, for secure aggregation: clients receive g, project and scale, and reveal only v_j.

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """Client form: the clients need g."""
        return {"g": server["delta"]} if self.form == "client" else {}

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """Client form: the client sends v_j and whether it was guarded, but not its angle."""
        if self.form != "client":
            return super().finish(y, ctx)
        D, g = ctx.w - y, ctx.broadcast["g"]
        p_1, s_1, guarded_1 = self.scales(residuals(D[None], g, look=False))
        v = scaled(D, g, p_1, s_1)
        v = v / ctx.steps if self.normalize_by_steps else v
        return {"delta": v, "guarded": guarded_1[0].to(D.dtype)}, {}

    def aggregate(self, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """Streaming form: one update at a time. Client form: the sums of v_j and of the flags, nothing else."""
        if self.form == "streaming":
            stream = Stream(self, server["delta"])
            for u_d, weight, steps in zip(up["delta"], cohort.weights, cohort.steps, strict=True):
                stream.add(u_d / steps if self.normalize_by_steps else u_d, weight)
            return stream.step(cohort.server_lr, cohort.client_lr)
        if self.form == "client" and self.guard == "exclude":
            weights = cohort.weights / cohort.client_lr
            counted = weights @ (1 - up["guarded"].to(weights.dtype))
            total = weighted_sum(weights, up["delta"])
            total = total * safe_ratio(weights.sum(), counted).to(total.dtype)
            delta = self.accelerated(self.clean(total, server["delta"]), server["delta"])
            return Step(delta, rate=cohort.server_lr, server={"delta": delta}, notes={"guarded": up["guarded"].sum()})
        return super().aggregate(w, server, up, cohort)
