"""The only round loop: sample, probe, broadcast, train, screen, aggregate, evaluate, record."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Engine
from feddpc.methods.base import Method, State
from feddpc.round import chunking
from feddpc.round.federation import Federation, Ints, RunState, gather, regather
from feddpc.round.meter import numbers
from feddpc.round.probes import probe_cohort, probe_population
from feddpc.round.sampling import Draw
from feddpc.round.server_step import apply_step, drop_non_finite, empty_round, select_rows, server_step


@dataclass(frozen=True)
class RoundRecord:
    """What is known about one finished round."""

    round: int
    test_accuracy: float
    test_loss: float
    train_loss: float
    seconds: float
    participants: list[int]
    dropped: list[int]
    rejected: list[int]
    notes: dict[str, float] = field(default_factory=dict)
    diverged: str | None = None
    validation: tuple[float, float] | None = None  #: accuracy and loss on samples held out of training
    faults: dict[str, list[int]] = field(default_factory=dict)  #: who misbehaved, by what it did


class Exchanged(NamedTuple):
    """Whose updates counted, their loss, the method's notes, and how the model does if the engine found out."""

    kept: Ints
    loss: float = math.nan
    notes: dict[str, float] = {}  # noqa: RUF012
    scored: tuple[float, float] | None = None
    faults: dict[str, list[int]] = {}  # noqa: RUF012
    validated: tuple[float, float] | None = None


def run_round(federation: Federation, method: Method, engine: Engine, progress: RunState) -> RoundRecord:
    """Run the next round: ``progress`` is moved on, and what happened is returned."""
    began = time.perf_counter()
    t = progress.round + 1
    if t == 1:
        progress.meter.down_once, progress.meter.up_once = federation.once
        if method.surveys:
            probe_population(federation, method, engine, progress)
    draw = federation.draw(t)
    before = replace(federation.task.tally)
    kept, loss, notes, scored, faults, validated = _exchange(federation, method, engine, progress, t, draw.answered)
    progress.meter.gradients += federation.task.tally.gradients - before.gradients
    progress.meter.passes += federation.task.tally.passes - before.passes
    progress.round = t
    rejected = np.setdiff1d(draw.answered, kept)
    wary = federation.faults or federation.defense  # then a round of bad updates only is no sign of divergence
    evaluate = federation.evaluate or (lambda _: (math.nan, 0.0))
    accuracy, test_loss = scored or evaluate(method.evaluated(progress.w, progress.server))
    if federation.validate is not None and validated is None:
        validated = federation.validate(method.evaluated(progress.w, progress.server))
    return RoundRecord(
        round=t,
        test_accuracy=accuracy,
        test_loss=test_loss,
        train_loss=loss,
        seconds=time.perf_counter() - began,
        participants=kept.tolist(),
        dropped=draw.dropped.tolist(),
        rejected=rejected.tolist(),
        notes=notes,
        diverged=_diverged(None if scored else progress.w, test_loss, len(kept), 0 if wary else len(rejected)),
        validation=validated,
        faults=late(federation, t, draw) | faults,
    )


def _exchange(
    federation: Federation, method: Method, engine: Engine, progress: RunState, t: int, ids: Ints
) -> Exchanged:
    """Let clients ``ids`` train and the server aggregate."""
    if not len(ids):
        return Exchanged(ids, notes=empty_round(federation, method, progress, t))
    task, w = federation.task, progress.w
    client_lr, _ = federation.rates(t)
    plan, cohort = gather(federation, method, progress, t, ids)
    probed: State = {}
    if method.probes:
        invited, probed = ids, probe_cohort(federation, method, engine, w, cohort, ids)
        ids, (probed,) = drop_non_finite(ids, probed)
        if not len(ids):
            return Exchanged(ids, notes=empty_round(federation, method, progress, t))
        if len(ids) < len(invited):
            plan, cohort = gather(federation, method, progress, t, ids)
    # Noise is drawn, faults are made and rules are applied between training and the step.
    whole = federation.faults is None and federation.defense is None and federation.privacy is None
    if whole and (done := engine.round(federation, method, progress, probed, plan, cohort)):
        progress.slots.write(ids, done.slots)
        progress.clients.write(ids, done.own)
        _count(federation, progress, plan, done.sent)
        return Exchanged(ids, done.loss, done.notes, done.scored, validated=done.validated)
    w = progress.w
    down = method.broadcast(w, progress.server, probed if method.reports else {}, cohort)
    own = progress.clients.read(ids)
    trained = chunking.train_in_chunks(engine, method, task, w, down | federation.kit, own | probed, plan, client_lr)
    up, who = trained.up, dict[str, list[int]]()
    if federation.faults is not None:
        up, progress.watched, who = federation.faults.tamper(t, ids, up, progress.watched)
    kept, (up, own, losses) = drop_non_finite(ids, up, trained.own, {"loss": trained.loss})
    if not len(kept):
        return Exchanged(kept, notes=empty_round(federation, method, progress, t), faults=who)
    if len(kept) < len(ids):
        _, cohort = gather(federation, method, progress, t, kept)
    again = partial(regather, federation, method, progress, t)
    served = server_step(method, progress, up, cohort, again, federation.defense, federation.privacy)
    if served is None:
        return Exchanged(kept[:0], notes=empty_round(federation, method, progress, t), faults=who)
    kept, (own, losses) = select_rows(served.good, kept, own, losses)
    if federation.faults is not None:
        progress.watched = federation.faults.saw(served.step.update, progress.watched)
    notes = apply_step(progress, kept, served.step)
    progress.clients.write(kept, own)
    sent = [*trained.up.values(), *(probed.values() if method.reports else ())]
    _count(federation, progress, plan, (numbers(down.values()), numbers(sent)))
    loss = losses["loss"][served.cohort.steps > 0].mean()  # NaN when nobody trained
    return Exchanged(kept, float(loss), notes, faults=who)


def _count(federation: Federation, progress: RunState, plan: BatchPlan, moved: tuple[int, int]) -> None:
    """Write down what the round moved (beside the model to each client, and from all), and what is remembered now."""
    meter, m = progress.meter, len(plan.clients)
    meter.d = progress.w.numel()
    meter.clients += m
    meter.steps += int(federation.planner.steps(plan.sizes).sum())
    meter.down += m * (meter.d + moved[0])
    meter.up += moved[1]
    meter.client_state = progress.clients.width
    meter.server_state = numbers(progress.server.values()) + len(progress.slots) * progress.slots.width


def late(federation: Federation, t: int, draw: Draw) -> dict[str, list[int]]:
    """Return who of those that dropped out came too late, as faults are listed."""
    if federation.faults is None:
        return {}
    late = draw.dropped[federation.faults.late(t, draw.dropped)].tolist()
    return {"straggler": late} if late else {}


def _diverged(w: Tensor | None, test_loss: float, kept: int, rejected: int) -> str | None:
    """Say why a run must stop, or return None; ``w`` is None where it is known to be finite."""
    if rejected and not kept:
        return f"all {rejected} updates were non-finite"
    if w is not None and not bool(w.sum().isfinite() or w.isfinite().all()):
        return "the model has non-finite parameters"
    if not math.isfinite(test_loss):
        return f"the test loss is {test_loss}"
    return None
