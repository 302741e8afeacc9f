"""What clients are asked before they train: the cohort of a round, or once the whole population.

How a client is asked is the caller's: an engine of the simulator runs the probe, a federation sends a message.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Prober
from feddpc.experiment import Experiment
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.statistics import STATISTICS
from feddpc.optimizers import server_state
from feddpc.population import Population, placed
from feddpc.ranks import ALONE, Ranks
from feddpc.round.server_step import finite_rows, select_rows
from feddpc.round.state import RunState, numbers

Ints = NDArray[np.int64]
#: Lets clients answer the method's probe and returns their answers, stacked; NaN for a client without an answer.
Ask = Callable[[Ints], State]
#: How many clients of a survey are asked in one go.
SURVEYED_AT_ONCE = 16


def ask_cohort(method: Method, w: Tensor, cohort: Cohort, ids: Ints, ask: Ask) -> tuple[Tensor | None, State]:
    """Return which clients of a cohort have finite answers to the probe (None: all), and these answers.

    Clients that the method does not ask have its default answer.
    """
    asked = method.probe_mask(cohort)
    if asked is None:
        return _finite(ask(ids))
    answers = {k: v.expand(len(ids), *v.shape).clone() for k, v in method.default_probe(w).items()}
    if asked.any():
        rows = placed(np.flatnonzero(asked), w.device)
        for key, stack in ask(ids[asked]).items():
            answers[key][rows] = stack
    return _finite(answers)


def survey(
    method: Method,
    state: RunState,
    population: Population,
    ask: Ask,
    remember: Callable[[Ints, State], None],
    ranks: Ranks = ALONE,
) -> None:
    """Let every client of the population answer the probe once, some at a time; the server learns the mean.

    ``remember`` is called with the clients that have finite answers, and these answers. Each of several ranks asks some
    of the clients.
    """
    total: State = {}
    for first in range(ranks.rank * SURVEYED_AT_ONCE, len(population), ranks.size * SURVEYED_AT_ONCE):
        ids = np.arange(first, min(first + SURVEYED_AT_ONCE, len(population)))
        finite, answers = _finite(ask(ids))
        ids = ids if finite is None else ids[finite.cpu().numpy()]
        remember(ids, answers)
        shares = population.shares(ids)
        for key, stack in answers.items():
            part = exact_sum(stack, shares.to(stack.device))
            total[key] = total[key] + part if key in total else part
    state.server = method.server_state_from_probe(state.server, ranks.total(total)) | server_state(state.server)


def _finite(answers: State) -> tuple[Tensor | None, State]:
    finite = finite_rows(answers)
    return finite, answers if finite is None else select_rows(finite, answers)


# The simulator's.


def probe_cohort(
    experiment: Experiment, method: Method, prober: Prober, state: RunState, plan: BatchPlan, cohort: Cohort
) -> tuple[BatchPlan, Cohort, State]:
    """Return the answers of a cohort to the method's probe, and the clients that go on: those with finite answers."""
    if not len(plan.clients):
        return plan, cohort, {}
    ask = asker(experiment, method, prober, state)
    finite, answers = ask_cohort(method, state.w, cohort, plan.clients, ask)
    if finite is None:
        return plan, cohort, answers
    return plan.take(np.flatnonzero(finite.cpu().numpy())), cohort.select(finite), answers


def probe_population(
    experiment: Experiment, method: Method, prober: Prober, state: RunState, ranks: Ranks = ALONE
) -> None:
    """Let every client of the population answer the probe, and remember what the method makes of its answer."""
    meter, population, before, sent = state.meter, experiment.population, experiment.task.work.gradients, 0

    def remember(ids: Ints, answers: State) -> None:
        nonlocal sent
        kept = {key: rows for key, rows in state.clients.read(ids).items() if key == STATISTICS}
        state.clients.write(ids, method.client_state_from_probe(answers) | kept)
        sent += numbers(answers.values())

    survey(method, state, population, asker(experiment, method, prober, state), remember, ranks)
    made = experiment.task.work.gradients - before
    sent, made = (sum(parts) for parts in zip(*ranks.gather((sent, made)), strict=True))
    meter.up_once += sent / len(population)
    meter.down_once += state.w.numel()
    meter.gradients_once += made / len(population)


def asker(experiment: Experiment, method: Method, prober: Prober, state: RunState) -> Ask:
    """Return what asks clients; if the network measures statistics, it has the global ones meanwhile."""
    asked = method if state.statistics is None else experiment.local(method, state.statistics)
    planner = experiment.planner
    return lambda ids: prober.probe(asked, experiment.task, state.w, experiment.staged(planner.sweep(ids)))
