"""The server's half of a round: which answers count, what rule they go through, and the step that comes of them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from feddpc.engine.federation import Federation, Ints, Progress, gather
from feddpc.methods.base import Cohort, Method, State, Step


class Served(NamedTuple):
    """Whose answers counted (a mask), they as a cohort, and what the method notes of the round."""

    good: Tensor
    cohort: Cohort
    notes: dict[str, float]


def serve(
    federation: Federation, method: Method, progress: Progress, ids: Ints, up: State, cohort: Cohort, least: int = 1
) -> Served | None:
    """Let the server move the model with what clients ``ids`` sent, all of it finite.

    None, and nothing moves, if fewer than ``least`` are within the bound on norms.
    """
    defence, t = federation.defence, cohort.round
    good = torch.ones(len(ids), dtype=torch.bool, device=progress.w.device)
    if defence is not None:
        good, progress.watched = defence.screen(up, cohort.steps > 0, progress.watched)
        if not bool(good.all()):
            _, (up,) = only(good, ids, up)
            _, cohort = gather(federation, method, progress, t, ids[good.cpu().numpy()])
    if len(cohort.clients) < least:
        return None
    if defence is not None and defence.rule is not None:
        chosen, rows = defence.judge(method.rows(progress.server, up, cohort), cohort.steps > 0)
        if not bool(chosen.all()):
            good = good.masked_scatter(good, chosen)
            _, cohort = gather(federation, method, progress, t, ids[good.cpu().numpy()])
        step = method.combine(progress.w, progress.server, rows, cohort)
    else:
        rule = method.aggregate if federation.privacy is None else partial(federation.privacy.step, method)
        step = rule(progress.w, progress.server, up, cohort)
    if federation.faults is not None:
        progress.watched = federation.faults.saw(step.update, progress.watched)
    return Served(good, cohort, settle(progress, ids[good.cpu().numpy()], step))


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
