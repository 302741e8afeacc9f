"""One communication round, from top to bottom: sample, probe, train, screen, step, evaluate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from feddpc.engines.base import Engine
from feddpc.experiment import Experiment
from feddpc.methods.base import Method, State
from feddpc.round.client_evaluation import evaluate_clients
from feddpc.round.exchange import Exchange, empty_exchange
from feddpc.round.probes import probe_population
from feddpc.round.state import RunState


@dataclass(frozen=True)
class RoundRecord:
    """What is known about one finished round."""

    round: int
    train_loss: float
    seconds: float
    participants: list[int]
    dropped: list[int]
    rejected: list[int]
    notes: dict[str, float] = field(default_factory=dict)
    diverged: str | None = None
    #: By name, first the primary one: ``test_accuracy``, ``test_loss``, ``validation_accuracy``; None if not evaluated.
    metrics: dict[str, float | None] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)  #: who misbehaved, by what it did
    client_metrics: dict[str, list[float]] = field(default_factory=dict)  #: at each client, in the last round
    federation: dict[str, Any] = field(default_factory=dict)  #: of real clients: their nodes and metrics, the time


def run_round(experiment: Experiment, method: Method, engine: Engine, state: RunState) -> RoundRecord:
    """Run the next round: ``state`` is moved on, and what happened is returned."""
    began, t = time.perf_counter(), state.round + 1
    if t == 1:
        state.meter.down_once, state.meter.up_once = experiment.once
        if method.surveys:
            probe_population(experiment, method, engine, state, engine.ranks)
    work_before = replace(experiment.task.work)

    draw = experiment.draw(t)  # who is invited, who answers
    plan, cohort = engine.cohort(experiment, method, state, t, draw.answered)  # their batches, weights and rates
    engine.read_ahead(experiment, t + 1)
    probes: State = {}
    if method.probes:  # the method asks its clients before they train
        plan, cohort, probes = engine.probe_cohort(experiment, method, state, plan, cohort)
    if len(cohort.whole.clients):
        exchange = engine.exchange(experiment, method, state, plan, cohort, probes)  # training, screening, server step
    else:
        exchange = empty_exchange(experiment, method, state, cohort)

    state.round = t
    state.meter.add_work(experiment.task.work, work_before)
    metrics = _evaluate(experiment, method, engine, state, exchange)
    clients: dict[str, list[float]] = {}
    if experiment.client_tests is not None and experiment.evaluates_in(t):
        client_metrics = evaluate_clients(experiment, method, engine, state)
        clients = client_metrics.values
        spread = {f"clients_{name}": value for name, value in client_metrics.summary.items()}
        metrics = {**metrics, **spread}
    rejected = np.setdiff1d(draw.answered, exchange.kept)
    replayed = exchange.score is not None  # then the engine has found the model to be finite
    # With faults or a defense, a round of bad updates only is no sign of divergence.
    bad = 0 if experiment.policies.faults or experiment.policies.defense else len(rejected)
    return RoundRecord(
        round=t,
        train_loss=exchange.loss,
        seconds=time.perf_counter() - began,
        participants=exchange.kept.tolist(),
        dropped=draw.dropped.tolist(),
        rejected=rejected.tolist(),
        notes=exchange.notes,
        diverged=_diverged(None if replayed else state.w, metrics.get("test_loss"), len(exchange.kept), bad),
        metrics=metrics,
        faults=experiment.population.stragglers(t, draw) | exchange.faults,
        client_metrics=clients,
    )


def _evaluate(
    experiment: Experiment, method: Method, engine: Engine, state: RunState, exchange: Exchange
) -> dict[str, float | None]:
    """Return the metrics on the test set and on held-out samples, which the engine may have found already."""
    score, validation, keys = exchange.score, exchange.validation, experiment.record_keys
    due = experiment.evaluates_in(state.round)
    if score is None:
        score = engine.evaluate(experiment.task, state.model(method)) if due else {}
    if validation is None and experiment.validate is not None:
        validation = engine.validate(experiment.validate, state.model(method)) if due else {}
    metrics = {key: score.get(name) for key, name in keys["test"].items()}
    if validation is not None:
        metrics |= {key: validation.get(name) for key, name in keys["validation"].items()}
    return metrics


def _diverged(w: Tensor | None, test_loss: float | None, kept: int, rejected: int) -> str | None:
    """Say why a run must stop, or return None; ``w`` is None where it is known to be finite."""
    if rejected and not kept:
        return f"all {rejected} updates were non-finite"
    if w is not None and not bool(w.sum().isfinite() or w.isfinite().all()):
        return "the model has non-finite parameters"
    if test_loss is not None and not math.isfinite(test_loss):
        return f"the test loss is {test_loss}"
    return None
