"""The server's half of a round, one pure function: which uploads count, the rule they go through, and the step.

It does not know where the uploads came from: the simulator and a real federation both call it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort, Method, State, Step
from feddpc.optimizers import SERVER_STATE, ServerOptimizer, server_state
from feddpc.policies import Policies
from feddpc.robust.defense import Defense

#: What records have besides the notes of methods.
RECORD_FIELDS = ("round", "train_loss", "seconds", "participants", "dropped", "rejected", "faults", "diverged")
RECORD_PREFIXES = ("test_", "validation_")


class StepOutcome(NamedTuple):
    """What the server makes of the uploads of a cohort."""

    kept: Tensor  #: whose uploads count, a mask over the cohort
    cohort: Cohort  #: the clients whose uploads count
    step: Step | None  #: None if no upload counts: the model stays as it is
    watched: State  #: what screening remembers for the next round
    screened: Tensor | None = None  #: whose uploads are beyond the bound on norms, a mask; None if none is


def server_step(
    method: Method,
    w: Tensor,
    server: State,
    uploads: State,
    cohort: Cohort,
    policies: Policies,
    watched: State,
    *,
    minimum: int = 1,
) -> StepOutcome:
    """Screen the uploads of a cohort, all of them finite, apply the robust rule or privacy, and make the step.

    If fewer than ``minimum`` uploads are within the bound on norms, none of them counts. A server optimizer comes
    last: what the method remembers of its own direction stays.
    """
    kept = torch.ones(len(cohort.clients), dtype=torch.bool, device=w.device)
    defense, privacy, screened = policies.defense, policies.privacy, None
    if defense is not None and len(kept):
        kept, watched = defense.screen(uploads, cohort.steps != 0, watched)
        screened = ~kept
        if int(kept.sum()) < minimum:
            none = torch.zeros_like(kept)
            return StepOutcome(none, cohort.select(none), None, watched, screened)
        if not bool(kept.all()):
            uploads, cohort = select_rows(kept, uploads), cohort.select(kept)
    if not len(kept):
        # Under privacy an empty round still adds noise, so that it cannot be recognized.
        step = None if privacy is None else privacy.step(method, w, server, {}, cohort)
    elif defense is not None and defense.rule is not None:
        step, chosen = _robust_step(method, w, server, uploads, cohort, defense)
        if not bool(chosen.all()):
            kept, cohort = kept.masked_scatter(kept, chosen), cohort.select(chosen)
    else:
        step = own_step(method, w, server, uploads, cohort, policies)
    if step is not None and policies.optimizer is not None:
        step = optimized(step, policies.optimizer, server, cohort)
    return StepOutcome(kept, cohort, step, watched, screened)


def own_step(method: Method, w: Tensor, server: State, uploads: State, cohort: Cohort, policies: Policies) -> Step:
    """Return the step of the method's own rule, or of its private form; a server optimizer comes after it."""
    if policies.privacy is not None:
        return policies.privacy.step(method, w, server, uploads, cohort)
    return check_step(method, method.aggregate(w, server, uploads, cohort), w)


def check_step(method: Method, step: Any, w: Tensor) -> Step:
    """Return what the server rule of ``method`` returned, or say what is wrong with it."""
    if not isinstance(step, Step):
        raise BadInputError(
            f"{method.name}: aggregate or combine returned {type(step).__name__}: return Step(update, rate=...)"
        )
    shape = tuple(getattr(step.update, "shape", ()))
    if shape != tuple(w.shape):
        raise BadInputError(
            f"{method.name}: the update of its Step has shape {shape}, but the model {tuple(w.shape)}: return one "
            "vector, such as cohort.mean(up['delta'])"
        )
    for name, value in step.notes.items():
        if name in RECORD_FIELDS or name.startswith(RECORD_PREFIXES):
            raise BadInputError(f"{method.name}: a note cannot be called {name!r}, as records have that: rename it")
        if not isinstance(value, int | float) and getattr(value, "numel", lambda: 0)() != 1:
            raise BadInputError(f"{method.name}: the note {name!r} is not one number: give its mean, or leave it out")
    return step


def apply_step_(w: Tensor, step: Step) -> Tensor:
    """Move the model ``w``, in place: ``w_t = w_{t-1} - rate * update``."""
    if isinstance(step.rate, Tensor):
        return w.addcmul_(step.update, -step.rate.to(w.dtype))
    return w.add_(step.update, alpha=-step.rate)


def optimized(step: Step, optimizer: ServerOptimizer, server: State, cohort: Cohort) -> Step:
    """Return the step that ``optimizer`` makes of ``step``; its state is in ``server`` under names of its own."""
    before = {key.removeprefix(SERVER_STATE): value for key, value in server_state(server).items()}
    step, after = step.optimized(optimizer, before, cohort)
    return replace(step, server=step.server | {SERVER_STATE + key: value for key, value in after.items()})


def _robust_step(
    method: Method, w: Tensor, server: State, uploads: State, cohort: Cohort, defense: Defense
) -> tuple[Step, Tensor]:
    """Return the step from the uploads that the robust rule accepts, and whose those are, a mask over ``cohort``."""
    whole = _defines_whole_rule(method)
    rows, notes = (uploads, {}) if whole else method.transform(server, uploads, cohort)
    chosen, accepted = defense.apply_rule({key: stacked(value) for key, value in rows.items()}, cohort.steps != 0)
    combine = method.aggregate if whole else method.combine
    step = check_step(method, combine(w, server, accepted, cohort if bool(chosen.all()) else cohort.select(chosen)), w)
    return replace(step, notes={**step.notes, **notes}), chosen


def _defines_whole_rule(method: Method) -> bool:
    """Say whether a method overrides `aggregate` later than `combine`, and so needs the accepted uploads there."""
    order = type(method).__mro__
    aggregate, combine = (next(i for i, c in enumerate(order) if hook in vars(c)) for hook in ("aggregate", "combine"))
    return aggregate < combine


def stacked(rows: Any) -> Tensor:
    """Return transformed rows as one tensor."""
    return rows if isinstance(rows, Tensor) else torch.stack(list(rows))


def finite_rows(*states: State) -> Tensor | None:
    """Return which clients have only finite numbers in all their rows, a mask; None if all do."""
    tensors = [rows.reshape(len(rows), -1) for state in states for rows in state.values()]
    # A sum is finite only if all its terms are, and it is one fast pass; the exact look is for the rare other case.
    if all(bool(t.sum().isfinite()) for t in tensors):
        return None
    return torch.stack([t.isfinite().all(1) for t in tensors]).all(0)


def select_rows(mask: Tensor, rows: State) -> State:
    """Return the rows of the clients that ``mask`` marks."""
    return {key: value[mask] for key, value in rows.items()}
