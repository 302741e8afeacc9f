"""One run on several processes: each trains its share of the cohort, and all of them make the same step.

Every rank draws the same cohort and deals it in the same way, so no rank has to be told what to do. What travels is
what the server's rule adds up, a few numbers per client, and the memories of clients that another rank trains now.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan, Ints
from feddpc.engines.base import Engine, Trained
from feddpc.engines.distributed.homes import Homes
from feddpc.engines.distributed.shares import deal
from feddpc.engines.distributed.sums import AtOnce, SharedCohort, in_order, share_of
from feddpc.methods.base import Cohort, Method, State
from feddpc.population import placed
from feddpc.ranks import Ranks
from feddpc.tasks.base import Task, WorkCounter
from feddpc.tasks.network import NetworkTask

if TYPE_CHECKING:
    from feddpc.experiment import Experiment
    from feddpc.round.exchange import Exchange
    from feddpc.round.state import RunState
    from feddpc.validation import HeldOutEvaluator


class Distributed(Engine):
    """Deals clients to ranks; each rank trains its own with the ``inner`` engine.

    ``at_once`` is how many clients a rank trains before it adds up their uploads and forgets them; by default as many
    as fit into a fixed amount of memory.
    """

    name: ClassVar[str] = "distributed"

    def __init__(self, inner: Engine, ranks: Ranks, at_once: int | None = None) -> None:
        self.inner, self.ranks, self.at_once = inner, ranks, at_once
        self.homes = Homes(ranks)
        self.work_before = WorkCounter()  #: what this rank had computed when the round began

    def refuses(self, task: Task) -> str | None:
        """What the inner engine cannot run cannot be run."""
        return self.inner.refuses(task)

    def release(self) -> None:
        """Let the inner engine give back what it keeps."""
        self.inner.release()

    # A round.

    def cohort(
        self, experiment: Experiment, method: Method, state: RunState, t: int, ids: Ints
    ) -> tuple[BatchPlan, Cohort]:
        """Deal the clients to the ranks; return the batches and the cohort of this one."""
        self.ranks.mark(t, "training")
        self.work_before = replace(experiment.task.work)
        device, steps = experiment.w0.device, experiment.planner.steps(experiment.population.sizes[ids])
        whole, training = experiment.population.cohort(method, t, ids, steps, {}, device)
        self.homes.find(state)
        shares = deal(steps if training is None else np.where(training, steps, 0), self.ranks.size, self.homes.of(ids))
        self.homes.move(state, ids, shares)
        mine = shares.places[self.ranks.rank]
        plan = experiment.staged(experiment.planner.plan(t, ids[mine]))
        if training is not None:
            plan = plan.resting(~training[mine])
        slots = state.slots.read(ids[mine])
        return plan, share_of(whole, shares, placed(mine, device), slots, AtOnce(self.ranks, shares))

    def read_ahead(self, experiment: Experiment, t: int) -> None:
        """Read the samples of this rank's next clients in the background, if they are in host memory."""
        host = experiment.task.host
        if host is None or t > experiment.config.rounds:
            return
        ids = experiment.draw(t).answered
        shares = deal(experiment.planner.steps(experiment.population.sizes[ids]), self.ranks.size, self.homes.of(ids))
        host.read_ahead(ids[shares.places[self.ranks.rank]], experiment.planner.partition)

    def probe_cohort(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort
    ) -> tuple[BatchPlan, Cohort, State]:
        """Let each rank ask its clients; those with answers that are not finite are left out everywhere."""
        from feddpc.round.probes import ask_cohort, asker

        assert isinstance(cohort, SharedCohort)
        finite, answers = None, State()
        if len(plan.clients):
            ask = asker(experiment, method, self, state)
            finite, answers = ask_cohort(method, state.w, cohort, plan.clients, ask)
        answers = self.with_keys(answers, cohort)
        good = torch.ones(len(plan.clients), dtype=torch.bool) if finite is None else finite.cpu()
        gone = in_order(self.ranks, cohort.shares, ~good[:, None])[:, 0].bool().numpy()
        if not gone.any():
            return plan, cohort, answers
        return plan.take(np.flatnonzero(good.numpy())), cohort.without(gone, self.ranks), answers

    def exchange(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort, probes: State
    ) -> Exchange:
        """Train this rank's clients, and make the step of all clients."""
        from feddpc.engines.distributed.exchange import exchange

        assert isinstance(cohort, SharedCohort)
        made = exchange(self, experiment, method, state, plan, cohort, probes)
        self.homes.note(cohort.whole.clients.cpu().numpy(), cohort.shares, made.kept)
        self.ranks.mark(cohort.round, "evaluating")
        return made

    def with_keys(self, stacks: State, cohort: SharedCohort) -> State:
        """Return stacks; on a rank without clients, empty ones like those of the others."""
        if all(cohort.shares.counts):
            return stacks
        known = self.ranks.alike(stacks)
        return stacks or {key: x.to(cohort.weights.device) for key, x in known.items()}

    # What the inner engine does.

    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Let the inner engine ask."""
        return self.inner.probe(method, task, w, plan)

    def train(
        self, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
    ) -> Trained:
        """Let the inner engine train."""
        return self.inner.train(method, task, w, broadcast, memory, plan, lr)

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, task: Task, w: Tensor) -> dict[str, float]:
        """Return the metrics of ``w``, with the batches of the test set dealt to the ranks."""
        if not isinstance(task, NetworkTask) or not task.sums_suffice:
            return self.inner.evaluate(task, w)
        return self._in_batches(task, w, task.test_batches())

    @torch.no_grad()
    def validate(self, evaluator: HeldOutEvaluator, w: Tensor) -> dict[str, float]:
        """Return the metrics of ``w`` on held-out samples, dealt to the ranks."""
        task = evaluator.task
        if not task.sums_suffice:
            return evaluator(w)
        return self._in_batches(task, w, task.test_batches(evaluator.batch_size))

    def clients_here(self, state: RunState, population: int) -> Ints:
        """Return the clients whose memories this rank has, and its part of those without a memory."""
        everyone = np.arange(population)
        home = self.homes.of(everyone)
        at = everyone % self.ranks.size if home is None else np.where(home < 0, everyone % self.ranks.size, home)
        here: Ints = everyone[at == self.ranks.rank]
        return here

    def of_all_clients(self, clients: Ints, values: dict[str, list[float]]) -> dict[str, list[float]]:
        """Bring the numbers of all ranks' clients together."""
        said = self.ranks.gather((clients, values))
        found = {name: np.zeros(sum(len(ids) for ids, _ in said)) for name in values}
        for ids, theirs in said:
            for name, numbers in theirs.items():
                found[name][ids] = numbers
        return {name: numbers.tolist() for name, numbers in found.items()}

    def _in_batches(self, task: NetworkTask, w: Tensor, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        shares = deal(np.array([len(x) for x, _ in batches], dtype=np.int64), self.ranks.size)
        mine = [batches[i] for i in shares.places[self.ranks.rank]]
        totals = self.inner.test_totals(task, w, mine)
        table = torch.stack(totals) if totals else torch.zeros(0, task.totals, dtype=torch.float64)
        # In the order of the batches, so that the sum does not depend on the number of ranks.
        return task.means(functools.reduce(torch.add, in_order(self.ranks, shares, table)).tolist())
