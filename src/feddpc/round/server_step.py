"""The server's half of a round: which answers count, what rule they go through, and the step that comes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from feddpc.methods.base import Cohort, Method, State, Step
from feddpc.privacy import Mechanism
from feddpc.robust.defense import Defense
from feddpc.round.federation import Federation, Ints, RunState, gather


class StepOutcome(NamedTuple):
    """Whose answers counted (a mask), they as a cohort, and the step that the server makes of them."""

    good: Tensor
    cohort: Cohort
    step: Step


def server_step(
    method: Method,
    progress: RunState,
    up: State,
    cohort: Cohort,
    again: Callable[[Ints], Cohort],
    defense: Defense | None,
    privacy: Mechanism | None = None,
    least: int = 1,
) -> StepOutcome | None:
    """Return the step that the server makes of what a cohort sent, all of it finite.

    ``again`` returns the cohort of fewer clients. The result is None if fewer than ``least`` are within the bound on
    norms.
    """
    w, server = progress.w, progress.server
    if defense is None:
        rule = method.aggregate if privacy is None else partial(privacy.step, method)
        good = torch.ones(len(cohort.clients), dtype=torch.bool, device=w.device)
        return StepOutcome(good, cohort, rule(w, server, up, cohort))
    ids: Ints = cohort.clients.cpu().numpy()
    good, progress.watched = defense.screen(up, cohort.steps != 0, progress.watched)
    if int(good.sum()) < least:
        return None
    if not bool(good.all()):
        kept, (up,) = select_rows(good, ids, up)
        cohort = again(kept)
    if defense.rule is None:
        return StepOutcome(good, cohort, method.aggregate(w, server, up, cohort))
    rows, notes = method.rows(server, up, cohort)
    chosen, rows = defense.judge(rows, cohort.steps != 0)
    if not bool(chosen.all()):
        good = good.masked_scatter(good, chosen)
        cohort = again(ids[good.cpu().numpy()])
    step = method.combine(w, server, rows, cohort)
    return StepOutcome(good, cohort, replace(step, notes={**step.notes, **notes}))


def empty_round(federation: Federation, method: Method, progress: RunState, t: int) -> dict[str, float]:
    """No answer can be used: the model stays as it is, but for the noise that has to hide that nobody came."""
    if federation.privacy is None:
        progress.server = method.on_empty_round(progress.server)
        return {}
    ids = federation.draw(t).invited[:0]
    _, cohort = gather(federation, method, progress, t, ids)
    return apply_step(progress, ids, federation.privacy.step(method, progress.w, progress.server, {}, cohort))


def apply_step(progress: RunState, ids: Ints, step: Step) -> dict[str, float]:
    """Move the model by what a server rule made of the answers of clients ``ids``; return the method's notes."""
    step.apply_(progress.w)
    progress.server = step.server
    progress.slots.write(ids, step.slots)
    return {k: float(v) for k, v in step.notes.items()}


def drop_non_finite(ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Drop every client with a non-finite number in what it sent or would remember, before any arithmetic sees it."""
    tensors = [v.reshape(len(ids), -1) for state in states for v in state.values()]
    # A sum is finite only if all its terms are, and it is one fast pass; the exact look is for the rare other case.
    if all(bool(t.sum().isfinite()) for t in tensors):
        return ids, states
    return select_rows(torch.stack([t.isfinite().all(1) for t in tensors]).all(0), ids, *states)


def select_rows(good: Tensor, ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Return the clients of a mask, and their rows."""
    return ids[good.cpu().numpy()], tuple({k: v[good] for k, v in state.items()} for state in states)
