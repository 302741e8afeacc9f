"""The server's half of a round: which answers count, what rule they go through, and the step that comes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from feddpc.engine.federation import Federation, Ints, Progress, gather
from feddpc.methods.base import Cohort, Method, State, Step
from feddpc.privacy import Mechanism
from feddpc.robust.defence import Defence


class Served(NamedTuple):
    """Whose answers counted (a mask), they as a cohort, and the step that the server makes of them."""

    good: Tensor
    cohort: Cohort
    step: Step


def serve(
    method: Method,
    progress: Progress,
    up: State,
    cohort: Cohort,
    again: Callable[[Ints], Cohort],
    defence: Defence | None,
    privacy: Mechanism | None = None,
    least: int = 1,
) -> Served | None:
    """Return the step that the server makes of what a cohort sent, all of it finite.

    ``again`` returns the cohort of fewer clients. The result is None if fewer than ``least`` are within the bound on
    norms.
    """
    w, server = progress.w, progress.server
    if defence is None:
        rule = method.aggregate if privacy is None else partial(privacy.step, method)
        good = torch.ones(len(cohort.clients), dtype=torch.bool, device=w.device)
        return Served(good, cohort, rule(w, server, up, cohort))
    ids: Ints = cohort.clients.cpu().numpy()
    good, progress.watched = defence.screen(up, cohort.steps != 0, progress.watched)
    if int(good.sum()) < least:
        return None
    if not bool(good.all()):
        kept, (up,) = only(good, ids, up)
        cohort = again(kept)
    if defence.rule is None:
        return Served(good, cohort, method.aggregate(w, server, up, cohort))
    rows, notes = method.rows(server, up, cohort)
    chosen, rows = defence.judge(rows, cohort.steps != 0)
    if not bool(chosen.all()):
        good = good.masked_scatter(good, chosen)
        cohort = again(ids[good.cpu().numpy()])
    step = method.combine(w, server, rows, cohort)
    return Served(good, cohort, replace(step, notes={**step.notes, **notes}))


def nobody(federation: Federation, method: Method, progress: Progress, t: int) -> dict[str, float]:
    """No answer can be used: the model stays as it is, but for the noise that has to hide that nobody came."""
    if federation.privacy is None:
        progress.server = method.idle(progress.server)
        return {}
    ids = federation.draw(t).invited[:0]
    _, cohort = gather(federation, method, progress, t, ids)
    return settle(progress, ids, federation.privacy.step(method, progress.w, progress.server, {}, cohort))


def settle(progress: Progress, ids: Ints, step: Step) -> dict[str, float]:
    """Move the model by what a server rule made of the answers of clients ``ids``; return the method's notes."""
    step.apply_(progress.w)
    progress.server = step.server
    progress.slots.write(ids, step.slots)
    return {k: float(v) for k, v in step.notes.items()}


def screen(ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Drop every client with a non-finite number in what it sent or would remember, before any arithmetic sees it."""
    tensors = [v.reshape(len(ids), -1) for state in states for v in state.values()]
    # A sum is finite only if all its terms are, and it is one fast pass; the exact look is for the rare other case.
    if all(bool(t.sum().isfinite()) for t in tensors):
        return ids, states
    return only(torch.stack([t.isfinite().all(1) for t in tensors]).all(0), ids, *states)


def only(good: Tensor, ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Return the clients of a mask, and their rows."""
    return ids[good.cpu().numpy()], tuple({k: v[good] for k, v in state.items()} for state in states)
