"""What clients are asked before they train: the cohort of a round, or once the whole population."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Prober, placed
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import Cohort, Method, State
from feddpc.round.federation import Federation, Ints
from feddpc.round.server_step import finite_rows, select_rows
from feddpc.round.state import RunState, numbers

#: How many clients of a survey are asked in one go.
SURVEYED_AT_ONCE = 16


def probe_cohort(
    federation: Federation, method: Method, prober: Prober, state: RunState, plan: BatchPlan, cohort: Cohort
) -> tuple[BatchPlan, Cohort, State]:
    """Return the answers of a cohort to the method's probe, and the clients that can go on, whose answers are finite.

    Methods without a probe leave everything as it is.
    """
    if not method.probes or not len(plan.clients):
        return plan, cohort, {}
    answers = _ask(federation, method, prober, state.w, cohort, plan.clients)
    finite = finite_rows(answers)
    if finite is None:
        return plan, cohort, answers
    rows = np.flatnonzero(finite.cpu().numpy())
    return plan.take(rows), cohort.select(finite), select_rows(finite, answers)


def _ask(federation: Federation, method: Method, engine: Prober, w: Tensor, cohort: Cohort, ids: Ints) -> State:
    """Ask the clients that the method wants to ask; the others are given a default answer."""
    asked = method.probe_mask(cohort)
    if asked is None:
        return engine.probe(method, federation.task, w, federation.planner.sweep(ids))
    probed = {k: v.expand(len(ids), *v.shape).clone() for k, v in method.default_probe(w).items()}
    if asked.any():
        answers = engine.probe(method, federation.task, w, federation.planner.sweep(ids[asked]))
        rows = placed(np.flatnonzero(asked), w.device)
        for key, stack in answers.items():
            probed[key][rows] = stack
    return probed


def probe_population(federation: Federation, method: Method, engine: Prober, state: RunState) -> None:
    """Let every client of the population answer the probe, some at a time, and remember what came of it."""
    total: State = {}
    meter, population, before = state.meter, federation.population, federation.task.tally.gradients
    for first in range(0, population, SURVEYED_AT_ONCE):
        ids = np.arange(first, min(first + SURVEYED_AT_ONCE, population))
        answers = engine.probe(method, federation.task, state.w, federation.planner.sweep(ids))
        finite = finite_rows(answers)
        if finite is not None:
            ids, answers = ids[finite.cpu().numpy()], select_rows(finite, answers)
        state.clients.write(ids, method.client_state_from_probe(answers))
        shares = federation.shares(federation.planner.partition.sizes[ids])
        for key, stack in answers.items():
            part = exact_sum(stack, shares.to(stack.device))
            total[key] = total[key] + part if key in total else part
        meter.up_once += numbers(answers.values()) / population
    meter.down_once += state.w.numel()
    meter.gradients_once += (federation.task.tally.gradients - before) / population
    state.server = method.server_state_from_probe(state.server, total)
