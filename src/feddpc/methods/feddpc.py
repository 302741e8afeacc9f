"""FedDPC: project every update off the last global update, rescale what is left, average."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddpc.methods._algebra import (
    Residuals,
    project_out_,
    residual_sum,
    residuals,
    safe_ratio,
    saturated,
    square,
    weighted_sum,
)
from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step


@dataclass(frozen=True, kw_only=True)
class FedDPC(Method):
    """Project updates off the last global update, rescale what is left, average.

    Algorithm 1 of the paper, with g = Delta_{t-1} and Delta_0 = 0:

    Client j:  plain local SGD, sends u_j = w_{t-1} - w_j = eta_l D_j
    Server:    r_j     = D_j - (<D_j, g> / <g, g>) g              residual, orthogonal to g; D_j itself when g = 0
               v_j     = (lambda + |D_j| / |r_j|) r_j
               Delta_t = mean_S v_j
               w_t     = w_{t-1} - eta_g Delta_t

    | symbol | name               | default | domain                                                               |
    |--------|--------------------|---------|----------------------------------------------------------------------|
    | lambda | lam                | 1       | lam >= -1                                                            |
    |        | projection         | true    | false, with scaling false: FedAvg with two-sided rates (ablation)    |
    |        | scaling            | true    | false: v_j = r_j (ablation)                                          |
    | tau    | tau                | 1e-6    | 0 < tau < 1; an update with |r_j| <= tau |D_j| is guarded            |
    |        | guard              | zero    | zero, exclude, soft, keep; see below                                 |
    |        | max_scale          | 0       | above lam + 1; the factor of r_j is cut there. 0: not cut            |
    |        | form               | matrix  | matrix, streaming (O(d) memory), client (for secure aggregation)     |
    |        | normalize_by_steps | false   | divide D_j by K_j first, so that large clients do not count for more |

    Guard. |v_j| = |D_j| + lambda |r_j|, also when r_j is nothing but rounding noise: an update parallel to g would
    become a full-length step in a random direction. ``zero`` lets it count as v_j = 0; ``exclude`` takes it out of the
    mean; ``soft`` bounds the factor by |D_j| / (|r_j| + tau |D_j|); ``keep`` uses it unprojected, (lambda + 1) D_j.

    Largest factor. A hostile client that knows g may send almost a multiple of it: however short the rest, it becomes a
    step of the full length |D_j| wherever the client wishes. ``max_scale`` bounds the factor, and so |v_j| by
    ``max_scale`` |r_j|. The default, 0, is no bound: Algorithm 1 to the letter. For federations with clients that are
    not trusted docs/attacks.md recommends 10, which is met within 6.4 degrees of g at lambda = 1; honest clients can be
    that close to g too. In the client form a hostile client applies no bound to itself: there the server needs one on
    what is sent.

    Forms. They give the same numbers. ``streaming`` sees one update at a time (``Stream``). ``client`` sends g to the
    clients, which project and scale for themselves and reveal only v_j, so that the server needs nothing but the sum.
    Costs are given for matrix and streaming / client.

    Robust rules judge v_j, which is what is averaged, not what was sent.

    Departures: the guard, which the paper lacks; one clean-up projection of the mean where it could do more than
    rounding. Sums run in float64, but for long float32 vectors on a CPU, see
    ``algebra.py``.

    Confidence: paper; there is no public code.

    Reported each round: mean_scale (of the factor, over clients that are neither guarded nor zero), mean_cosine (of D_j
    with g), guarded (clients), capped (clients with the largest factor).

    >>> rule = FedDPC(lam=1.0)
    >>> D, g = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([1.0, 0.0])
    >>> rule.direction(D, g, torch.tensor([0.5, 0.5]))[0]
    tensor([0.0000, 6.5000])
    """

    name: ClassVar[str] = "feddpc"
    title: ClassVar[str] = "FedDPC"
    reference: ClassVar[str] = (
        "Sen, Nag, FedDPC: Handling Data Heterogeneity and Partial Client Participation, 2025, arXiv:2512.20329"
    )
    costs: ClassVar[Costs] = Costs(
        down="1 / 2",
        server_state="1",
        client_work="one vector operation / 8d once",
        server_work="6d a client / -",
    )

    lam: float = 1.0
    projection: bool = True
    scaling: bool = True
    tau: float = 1e-6
    guard: Literal["zero", "exclude", "soft", "keep"] = "zero"
    max_scale: float = 0.0
    form: Literal["matrix", "streaming", "client"] = "matrix"
    normalize_by_steps: bool = False

    def __post_init__(self) -> None:
        self.require(self.lam >= -1, "lam", "lam >= -1, below which updates are reversed")
        self.require(0 < self.tau < 1, "tau", "0 < tau < 1")
        bounded = self.max_scale == 0 or self.max_scale > self.lam + 1
        self.require(bounded, "max_scale", "above lam + 1, the factor of an update orthogonal to g; or 0, no bound")
        self.require(self.projection or not self.scaling, "scaling", "scaling without projection is not defined")

    def init_server(self, w: Tensor, population: int) -> State:
        """Alg. 1, input: Delta_0 = 0."""
        return {"delta": torch.zeros_like(w)}

    def on_empty_round(self, server: State) -> State:
        """Nobody answered: Delta_t = 0, so the next round does not project."""
        return {"delta": torch.zeros_like(server["delta"])}

    def aggregate(self, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """Alg. 1, lines 18 to 23. The rule is homogeneous in D, so it runs on u and is divided by eta_l once."""
        u_md, g = up["delta"], server["delta"]
        if self.form == "client":
            delta = self._mean_of_sent(up, g, cohort.weights / cohort.client_lr)
            notes = {"guarded": up["guarded"].sum()}
        elif self.form == "streaming":
            stream = Stream(self, g)
            for u_d, weight, steps in zip(u_md, cohort.weights, cohort.steps, strict=True):
                stream.add(u_d / steps if self.normalize_by_steps else u_d, weight)
            return stream.step(cohort.server_lr, cohort.client_lr)
        else:
            shrink = 1 / (cohort.steps * cohort.client_lr) if self.normalize_by_steps else 1 / cohort.client_lr
            delta, notes = self.direction(u_md, g, cohort.weights, shrink)
        return Step(delta, rate=cohort.server_lr, server={"delta": delta}, notes=notes)

    def direction(self, D_md: Tensor, g: Tensor, weights: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, State]:
        """Return Delta_t for a stack of updates, each or all multiplied by ``shrink``, and the round's diagnostics."""
        look = residuals(D_md, g)
        p_m, s_m, guarded_m = self.scales(look)
        if self.guard == "exclude":
            weights = torch.where(guarded_m, 0.0, weights)
            weights = safe_ratio(weights, weights.sum())
        delta = residual_sum(weights * s_m * shrink, p_m, D_md, g)
        if not look.clean:
            self._clean(delta, g, look.g2)
        return delta, self.notes(s_m, look.cosine_m, look.x2_m, guarded_m)

    def transformed(self, D_md: Tensor, g: Tensor, steps_m: Tensor) -> tuple[Iterator[Tensor], State]:
        """Return every v_j, made one at a time, and the round's diagnostics: for whoever must bound them one by one."""
        look = residuals(D_md, g)
        p_m, s_m, guarded_m = self.scales(look)
        factor_m = s_m / steps_m if self.normalize_by_steps else s_m
        v_md = (finite(D, g, p, s) for s, p, D in zip(factor_m, p_m, D_md, strict=True))
        return v_md, self.notes(s_m, look.cosine_m, look.x2_m, guarded_m)

    def scales(self, look: Residuals) -> tuple[Tensor, Tensor, Tensor]:
        """Return, a client: the multiple of g to subtract, the factor of what is left, and whether it is guarded."""
        D_m, r_m = look.x2_m.sqrt(), look.r2_m.sqrt()
        if not self.projection:
            return torch.zeros_like(D_m), torch.ones_like(D_m), torch.zeros_like(D_m, dtype=torch.bool)
        guarded_m = (r_m <= self.tau * D_m) & (D_m > 0)
        soft = self.tau * D_m if self.guard == "soft" else 0.0
        s_m = self.lam + safe_ratio(D_m, r_m + soft) if self.scaling else torch.ones_like(D_m)
        s_m = s_m.clamp(max=self.max_scale) if self.max_scale and self.scaling else s_m
        if self.guard == "soft":
            return look.p_m, s_m, guarded_m
        if self.guard == "keep":
            unprojected = self.lam + 1 if self.scaling else 1.0
            return torch.where(guarded_m, 0.0, look.p_m), torch.where(guarded_m, unprojected, s_m), guarded_m
        return look.p_m, torch.where(guarded_m, 0.0, s_m), guarded_m

    def rows(self, server: State, up: State, cohort: Cohort) -> tuple[State, State]:
        """Every v_j, which is what is averaged."""
        self.require(self.guard != "exclude", "guard", "zero, soft or keep with a robust rule, which chooses by itself")
        if self.form == "client":
            return {"delta": up["delta"]}, {"guarded": up["guarded"].sum()}
        v_md, notes = self.transformed(up["delta"], server["delta"], cohort.steps)
        return {"delta": torch.stack(list(v_md))}, notes

    def combine(self, w: Tensor, server: State, rows: State, cohort: Cohort) -> Step:
        """The mean of v_j, as in the client form."""
        delta = self._clean(weighted_sum(cohort.weights / cohort.client_lr, rows["delta"]), server["delta"])
        return Step(delta, rate=cohort.server_lr, server={"delta": delta})

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """Client form: the clients need g."""
        return {"g": server["delta"]} if self.form == "client" else {}

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """Client form: project and scale at the client, who sends v_j and whether it was guarded, but not its angle."""
        if self.form != "client":
            return super().finish(y, ctx)
        D, g = ctx.w - y, ctx.broadcast["g"]
        p_1, s_1, guarded_1 = self.scales(residuals(D[None], g, look=False))
        v = scaled(D, g, p_1, s_1)
        v = v / ctx.steps if self.normalize_by_steps else v
        return {"delta": v, "guarded": guarded_1[0].to(D.dtype)}, {}

    def notes(self, s_m: Tensor, cosine_m: Tensor, x2_m: Tensor, guarded_m: Tensor) -> State:
        """Return what is reported of a round."""
        counts_m = ((x2_m > 0) & ~guarded_m).double()
        mean_scale = safe_ratio((s_m * counts_m).sum(), counts_m.sum())
        capped = (counts_m * (s_m >= self.max_scale)).sum() if self.max_scale else torch.zeros_like(mean_scale)
        return {"mean_scale": mean_scale, "mean_cosine": cosine_m.mean(), "guarded": guarded_m.sum(), "capped": capped}

    def _mean_of_sent(self, up: State, g: Tensor, weights: Tensor) -> Tensor:
        """Client form: the server needs the sums of v_j and of the guard's flags, nothing else."""
        total = weighted_sum(weights, up["delta"])
        if self.guard == "exclude":
            counted = weights @ (1 - up["guarded"].to(weights.dtype))
            total = total * safe_ratio(weights.sum(), counted).to(total.dtype)
        return self._clean(total, g)

    def _clean(self, delta: Tensor, g: Tensor, g2: Tensor | None = None) -> Tensor:
        """Orthogonalise once more, in place: twice is enough."""
        return project_out_(delta, g, g2) if self.projection and self.guard != "keep" else delta


def scaled(D: Tensor, g: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """Return v = s (D - p g)."""
    return s.to(D.dtype) * (D - p.to(D.dtype) * g)


def finite(D: Tensor, g: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """Return v = s (D - p g), cut at the largest number where a finite D is scaled beyond it."""
    v = scaled(D, g, p, s)
    return v if bool(v.isfinite().all()) else saturated(scaled(D.double(), g.double(), p, s), D.dtype)


class Stream:
    """FedDPC's server fed one update at a time: beside the model it holds g, an accumulator and the update in hand.

    >>> stream = Stream(FedDPC(lam=1.0), torch.tensor([1.0, 0.0]))
    >>> for D in torch.tensor([[3.0, 4.0], [0.0, 2.0]]):
    ...     stream.add(D)
    >>> stream.result()[0]
    tensor([0.0000, 6.5000])
    """

    def __init__(self, rule: FedDPC, g: Tensor) -> None:
        self.rule, self.g = rule, g
        self.total, self.g2 = torch.zeros_like(g), square(g)
        self.weight = torch.zeros((), dtype=torch.float64, device=g.device)
        self.looks: list[tuple[Tensor, ...]] = []

    def add(self, D_d: Tensor, weight: Tensor | float = 1.0) -> None:
        """Take in one client's update; it may be forgotten afterwards."""
        look = residuals(D_d[None], self.g, g2=self.g2)
        p_1, s_1, guarded_1 = self.rule.scales(look)
        residual_sum(weight * s_1, p_1, D_d[None], self.g, into=self.total)
        counts = (~guarded_1[0]).double() if self.rule.guard == "exclude" else 1.0
        self.weight = self.weight + weight * counts
        self.looks.append((s_1, look.cosine_m, look.x2_m, guarded_1))

    def step(self, server_lr: float, client_lr: float = 1.0) -> Step:
        """Return the server's step along Delta_t."""
        delta, notes = self.result(client_lr)
        return Step(delta, rate=server_lr, server={"delta": delta}, notes=notes)

    def result(self, client_lr: float = 1.0) -> tuple[Tensor, State]:
        """Return Delta_t, the weighted mean of what came in over ``client_lr``, and the round's diagnostics."""
        self.total *= safe_ratio(torch.ones_like(self.weight), self.weight * client_lr).to(self.total.dtype)
        notes = self.rule.notes(*(torch.cat(parts) for parts in zip(*self.looks, strict=True))) if self.looks else {}
        return self.rule._clean(self.total, self.g, self.g2), notes
