"""What happens between the broadcast and the server's step: clients train, and the server makes a step of it."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.statistics import STATISTICS, mean_statistics
from feddpc.round.server_step import finite_rows, select_rows, server_step
from feddpc.round.state import numbers
from feddpc.tasks.base import Task

if TYPE_CHECKING:
    from feddpc.engines.base import Engine, Trained
    from feddpc.experiment import Experiment
    from feddpc.round.state import RunState

Ints = NDArray[np.int64]
#: Metrics of a model by name; empty where it was not evaluated.
Score = dict[str, float]


class Exchange(NamedTuple):
    """What came of a round's training and server step; scores only if the engine has them already."""

    kept: Ints  #: clients whose updates count
    loss: float = math.nan  #: mean training loss
    notes: dict[str, float] = {}  # noqa: RUF012
    faults: dict[str, list[int]] = {}  # noqa: RUF012
    score: Score | None = None
    validation: Score | None = None


def train_and_step(
    experiment: Experiment,
    method: Method,
    engine: Engine,
    state: RunState,
    plan: BatchPlan,
    cohort: Cohort,
    probes: State,
) -> Exchange:
    """Broadcast, train, simulate faults, screen, step, remember."""
    ids, policies = plan.clients, experiment.policies
    memory = state.clients.read(ids)
    broadcast, given = broadcast_to(experiment, method, state, cohort, probes)
    local = experiment.local(method, state.statistics)
    trained = train_in_chunks(engine, local, experiment.task, state.w, given, memory | probes, plan, cohort.client_lr)

    uploads, faults = dict(trained.uploads), dict[str, list[int]]()
    measured = {STATISTICS: uploads.pop(STATISTICS)} if STATISTICS in uploads else {}
    if policies.faults is not None:
        uploads, state.watched, faults = policies.faults.tamper(cohort.round, ids, uploads, state.watched)
    rows = {"uploads": uploads, "memory": trained.memory, "loss": {"loss": trained.loss}, "measured": measured}
    finite = finite_rows(*rows.values())
    if finite is not None:
        rows = {name: select_rows(finite, value) for name, value in rows.items()}
        cohort, ids = cohort.select(finite), ids[finite.cpu().numpy()]

    outcome = server_step(method, state.w, state.server, rows["uploads"], cohort, policies, state.watched)
    kept, state.watched = ids[outcome.kept.cpu().numpy()], outcome.watched
    if policies.faults is not None and outcome.step is not None:
        state.watched = policies.faults.saw(outcome.step.update, state.watched)
    notes = state.apply(method, outcome, kept)
    uploaded = [*uploads.values(), *(probes.values() if method.reports else ())]
    uploaded += [] if STATISTICS in memory else list(measured.values())
    count(experiment, state, plan.clients, numbers(broadcast.values()), numbers(uploaded), len(state.slots))
    if not len(kept):
        return Exchange(kept, notes=notes, faults=faults)
    state.clients.write(kept, select_rows(outcome.kept, rows["memory"]))
    if measured:
        statistics = rows["measured"][STATISTICS][outcome.kept]
        state.statistics = mean_statistics(experiment.task.flat, statistics, outcome.cohort.weights)
    return Exchange(kept, mean_loss(rows["loss"]["loss"][outcome.kept], outcome.cohort), notes, faults)


def empty_exchange(experiment: Experiment, method: Method, state: RunState, cohort: Cohort) -> Exchange:
    """No client answered: the method and privacy have rules for that."""
    empty = cohort.select(torch.zeros_like(cohort.clients, dtype=torch.bool))
    outcome = server_step(method, state.w, state.server, {}, empty, experiment.policies, state.watched)
    none = np.zeros(0, dtype=np.int64)
    return Exchange(none, notes=state.apply(method, outcome, none))


def broadcast_to(
    experiment: Experiment, method: Method, state: RunState, cohort: Cohort, probes: State
) -> tuple[State, State]:
    """Return what the server sends to clients besides the model, and what they have then, one-time payload included."""
    broadcast = method.broadcast(state.w, state.server, probes if method.reports else {}, cohort)
    if state.statistics is not None and not state.clients.keeps(STATISTICS):
        broadcast = broadcast | {STATISTICS: state.statistics}
    return broadcast, broadcast | experiment.one_time_payload


def mean_loss(losses: Tensor, cohort: Cohort) -> float:
    """Return the mean training loss of those who trained, NaN if no client did."""
    return float(losses[cohort.steps > 0].mean())


def count(experiment: Experiment, state: RunState, ids: Ints, down: int, up: int, slots: int) -> None:
    """Count what a round of clients ``ids`` moved (to each besides the model, and from all), and what is remembered."""
    meter, m = state.meter, len(ids)
    meter.d = state.w.numel()
    meter.clients += m
    meter.steps += int(experiment.planner.steps(experiment.population.sizes[ids]).sum())
    meter.down += m * (meter.d + down)
    meter.up += up
    meter.client_state = state.clients.width
    meter.server_state = numbers(state.server.values()) + slots * state.slots.width


def train_in_chunks(
    engine: Engine, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
) -> Trained:
    """Train the clients of ``plan``; where memory does not suffice, fewer at a time, and so from then on."""
    m, was = len(plan.clients), replace(task.work)
    while True:
        chunk = min(engine.chunk or m, m)
        try:
            parts = []
            for first in range(0, m, chunk):
                rows = np.arange(first, min(first + chunk, m))
                mine = {k: v[first : first + chunk] for k, v in memory.items()}
                chunk_plan = plan if chunk == m else plan.take(rows)
                parts.append(engine.train(method, task, w, broadcast, mine, chunk_plan, lr))
            return _joined(parts)
        except torch.OutOfMemoryError as error:
            if chunk == 1:
                raise BadInputError(
                    "the device's memory does not suffice for one client: take a smaller batch_size or model"
                ) from error
        task.work.reset_to(was)  # the next attempt trains all clients again
        # Outside the handler, which would keep the failed attempt's tensors alive.
        if w.is_cuda:
            torch.cuda.empty_cache()
        engine.chunk = -(-chunk // 2)
        warnings.warn(
            f"out of device memory with {chunk} clients at once: going on with {engine.chunk} at a time, same numbers",
            stacklevel=2,
        )


def _joined(parts: list[Trained]) -> Trained:
    if len(parts) == 1:
        return parts[0]
    uploads, memory = _stacked([p.uploads for p in parts]), _stacked([p.memory for p in parts])
    return parts[0]._replace(uploads=uploads, memory=memory, loss=torch.cat([p.loss for p in parts]))


def _stacked(states: list[State]) -> State:
    return {key: torch.cat([state[key] for state in states]) for key in states[0]}
