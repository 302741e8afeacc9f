"""What clients are asked before they train: the cohort of a round, or once the whole population."""

from __future__ import annotations

import numpy as np

from feddpc.data.batches import BatchPlan, Ints
from feddpc.engines.base import Prober
from feddpc.experiment import Experiment
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.statistics import STATISTICS
from feddpc.optimizers import server_state
from feddpc.population import ask_some
from feddpc.round.server_step import finite_rows, select_rows
from feddpc.round.state import RunState, numbers

#: How many clients of a survey are asked in one go.
SURVEYED_AT_ONCE = 16


def probe_cohort(
    experiment: Experiment, method: Method, prober: Prober, state: RunState, plan: BatchPlan, cohort: Cohort
) -> tuple[BatchPlan, Cohort, State]:
    """Return the answers of a cohort to the method's probe, and the clients that go on: those with finite answers."""
    if not len(plan.clients):
        return plan, cohort, {}
    asked, task = _asked(experiment, method, state), experiment.task

    def ask(ids: Ints) -> State:
        return prober.probe(asked, task, state.w, experiment.staged(experiment.planner.sweep(ids)))

    answers = ask_some(method, state.w, cohort, plan.clients, ask)
    finite = finite_rows(answers)
    if finite is None:
        return plan, cohort, answers
    rows = np.flatnonzero(finite.cpu().numpy())
    return plan.take(rows), cohort.select(finite), select_rows(finite, answers)


def probe_population(experiment: Experiment, method: Method, engine: Prober, state: RunState) -> None:
    """Let every client of the population answer the probe, some at a time, and remember what came of it."""
    total: State = {}
    meter, population, before = state.meter, len(experiment.population), experiment.task.tally.gradients
    for first in range(0, population, SURVEYED_AT_ONCE):
        ids = np.arange(first, min(first + SURVEYED_AT_ONCE, population))
        asked = _asked(experiment, method, state)
        answers = engine.probe(asked, experiment.task, state.w, experiment.staged(experiment.planner.sweep(ids)))
        finite = finite_rows(answers)
        if finite is not None:
            ids, answers = ids[finite.cpu().numpy()], select_rows(finite, answers)
        kept = {key: rows for key, rows in state.clients.read(ids).items() if key == STATISTICS}
        state.clients.write(ids, method.client_state_from_probe(answers) | kept)
        shares = experiment.population.shares(ids)
        for key, stack in answers.items():
            part = exact_sum(stack, shares.to(stack.device))
            total[key] = total[key] + part if key in total else part
        meter.up_once += numbers(answers.values()) / population
    meter.down_once += state.w.numel()
    meter.gradients_once += (experiment.task.tally.gradients - before) / population
    state.server = method.server_state_from_probe(state.server, total) | server_state(state.server)


def _asked(experiment: Experiment, method: Method, state: RunState) -> Method:
    """Return the method that asks; if the network measures statistics, one that has the global ones meanwhile."""
    return method if state.statistics is None else experiment.local(method, state.statistics)
