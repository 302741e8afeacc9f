"""What happens between the broadcast and the server's step where several ranks share a cohort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Trained
from feddpc.engines.distributed.sums import Recording, SharedCohort, Sums, in_order
from feddpc.methods.base import Method, State, Step
from feddpc.methods.statistics import STATISTICS, mean_statistics
from feddpc.population import placed
from feddpc.round.exchange import Exchange, broadcast_to, count, empty_exchange, mean_loss, train_in_chunks
from feddpc.round.server_step import StepOutcome, finite_rows, optimized, own_step, select_rows, server_step
from feddpc.round.state import numbers

if TYPE_CHECKING:
    from feddpc.engines.distributed.engine import Distributed
    from feddpc.experiment import Experiment
    from feddpc.round.state import RunState

#: A rank trains so many clients before it forgets their uploads that these take about so many bytes.
BYTES_AT_ONCE = 1 << 28
#: The hooks of a server's half; a class that overrides one of them says itself whether it needs only sums.
SERVER_HOOKS = ("broadcast", "transform", "combine", "aggregate")


def adds_up(method: Method) -> bool:
    """Say whether every rank can keep its rows: the method says so, and no class of the user's own comes in between."""
    order = type(method).__mro__
    said = next(i for i, kind in enumerate(order) if "needs_only_sums" in vars(kind))
    own = [kind for kind in order[:said] if not kind.__module__.startswith("feddpc.methods.")]
    return method.needs_only_sums and not any(hook in vars(kind) for kind in own for hook in SERVER_HOOKS)


def exchange(
    engine: Distributed,
    experiment: Experiment,
    method: Method,
    state: RunState,
    plan: BatchPlan,
    cohort: SharedCohort,
    probes: State,
) -> Exchange:
    """Train this rank's clients, and make the step of all clients."""
    share = Share(engine, experiment, method, state, cohort, probes)
    policies = experiment.policies
    if adds_up(method) and policies.faults is None and policies.defense is None:
        return share.step_from_sums(plan, cohort, probes)
    return share.step_from_rows(plan, cohort, probes)


class Share:
    """The clients of this rank in one round: what they receive, and what comes of them."""

    def __init__(
        self,
        engine: Distributed,
        experiment: Experiment,
        method: Method,
        state: RunState,
        cohort: SharedCohort,
        probes: State,
    ) -> None:
        self.engine, self.ranks = engine, engine.ranks
        self.experiment, self.method, self.state = experiment, method, state
        self.invited = cohort.whole
        self.broadcast, self.given = broadcast_to(experiment, method, state, cohort, probes)
        self.answered = row_numbers(probes) if method.reports else 0  #: numbers that each client has answered

    def train(self, plan: BatchPlan, probes: State, lr: float) -> Trained:
        """Train the clients of a plan."""
        if not len(plan.clients):
            return self.nobody()
        state, local = self.state, self.experiment.local(self.method, self.state.statistics)
        memory = state.clients.read(plan.clients) | probes
        return train_in_chunks(self.engine.inner, local, self.experiment.task, state.w, self.given, memory, plan, lr)

    def nobody(self) -> Trained:
        """Return what comes of no clients."""
        return Trained({}, self.state.clients.read(np.zeros(0, np.int64)), self.state.w.new_zeros(0))

    def step_from_sums(self, plan: BatchPlan, cohort: SharedCohort, probes: State) -> Exchange:
        """Train some clients at a time, add up what the server's rule wants of them, and forget their uploads."""
        state, work, spent = self.state, self.experiment.task.work, None
        while True:
            parts = Parts(self, cohort)
            for rows in self._few_at_a_time(plan):
                parts.add(self.train(plan.take(rows), _rows_of(probes, rows), cohort.client_lr), rows)
            parts.complete()
            spent = spent or replace(work)
            work.reset_to(spent)  # clients that train again do so for this engine only
            table = in_order(self.ranks, cohort.shares, parts.table)
            gone = table[:, 1].bool().numpy()
            if not gone.any():
                break
            # Weights are those among the clients that are left, so what was added up must be added up again.
            keep = np.flatnonzero(~gone[cohort.shares.places[self.ranks.rank]])
            plan, probes, cohort = plan.take(keep), _rows_of(probes, keep), cohort.without(gone, self.ranks)
            if not len(cohort.whole.clients):
                self._count(parts.sent)
                return empty_exchange(self.experiment, self.method, state, cohort.whole)
        step = parts.step()
        everyone = torch.ones_like(cohort.clients, dtype=torch.bool)
        notes = state.apply(self.method, StepOutcome(everyone, cohort, step, state.watched), plan.clients)
        state.clients.write(plan.clients, parts.memory)
        if parts.measured is not None:
            statistics = self.ranks.rows(parts.measured, cohort.shares.places)
            state.statistics = mean_statistics(self.experiment.task.flat, statistics, cohort.whole.weights)
        self._count(parts.sent)
        loss = mean_loss(table[:, 0].to(state.w), cohort.whole)
        return Exchange(cohort.whole.clients.cpu().numpy(), loss, notes)

    def step_from_rows(self, plan: BatchPlan, cohort: SharedCohort, probes: State) -> Exchange:
        """Bring the uploads of all clients to every rank, for rules that must see them next to each other."""
        state, policies, shares = self.state, self.experiment.policies, cohort.shares
        ids, mine = cohort.whole.clients.cpu().numpy(), shares.places[self.ranks.rank]
        trained = self.train(plan, probes, cohort.client_lr)
        uploads = self.engine.with_keys(dict(trained.uploads), cohort)
        uploads = {key: self.ranks.rows(x, shares.places) for key, x in uploads.items()}
        sent, measured = self._sent(uploads), uploads.pop(STATISTICS, None)
        slots = {key: self.ranks.rows(x, shares.places) for key, x in cohort.slots.items()}
        whole, faults = replace(cohort.whole, slots=slots), dict[str, list[int]]()
        if policies.faults is not None:
            uploads, state.watched, faults = policies.faults.tamper(whole.round, ids, uploads, state.watched)
        table = in_order(self.ranks, shares, _table(trained.loss, finite_rows(trained.memory)))
        rows = {"uploads": uploads, "measured": {} if measured is None else {STATISTICS: measured}}
        finite, good = finite_rows(*rows.values()), ~table[:, 1].bool()
        good = good if finite is None else good & finite.cpu()
        if not bool(good.all()):
            at = placed(good.numpy(), state.w.device)
            rows, whole = {name: select_rows(at, value) for name, value in rows.items()}, whole.select(at)
        outcome = server_step(self.method, state.w, state.server, rows["uploads"], whole, policies, state.watched)
        state.watched = outcome.watched
        if policies.faults is not None and outcome.step is not None:
            state.watched = policies.faults.saw(outcome.step.update, state.watched)
        good[good.clone()] = outcome.kept.cpu()
        kept, here = ids[good.numpy()], good.numpy()[mine]  # who counts, and which of this rank's clients do
        if outcome.step is not None and outcome.step.slots:
            ours = placed(np.isin(kept, plan.clients), state.w.device)
            outcome = outcome._replace(step=replace(outcome.step, slots=select_rows(ours, outcome.step.slots)))
        notes = state.apply(self.method, outcome, plan.clients[here])
        self._count(sent)
        if not len(kept):
            return Exchange(kept, notes=notes, faults=faults)
        state.clients.write(plan.clients[here], select_rows(placed(here, state.w.device), trained.memory))
        if measured is not None:
            statistics = rows["measured"][STATISTICS][outcome.kept]
            state.statistics = mean_statistics(self.experiment.task.flat, statistics, outcome.cohort.weights)
        return Exchange(kept, mean_loss(table[:, 0][good].to(state.w), outcome.cohort), notes, faults)

    def _few_at_a_time(self, plan: BatchPlan) -> Iterator[np.ndarray]:
        row = self.state.w.nbytes
        few = self.engine.at_once or max(1, BYTES_AT_ONCE // row)
        for first in range(0, len(plan.clients), few):
            yield np.arange(first, min(first + few, len(plan.clients)))

    def _sent(self, uploads: State) -> int:
        """Return how many numbers each client sends; statistics that it keeps do not count."""
        kept = STATISTICS in self.state.clients.read(np.zeros(0, np.int64))
        return row_numbers({key: x for key, x in uploads.items() if not (kept and key == STATISTICS)})

    def _count(self, sent: int) -> None:
        """Count what all ranks have moved and computed in this round."""
        state, work, began = self.state, self.experiment.task.work, self.engine.work_before
        mine = torch.tensor([work.gradients - began.gradients, work.passes - began.passes, len(state.slots)])
        gradients, passes, slots = (int(n) for n in self.ranks.add([mine])[0])
        work.reset_to(began)
        work.add(gradients, passes)
        ids = self.invited.clients.cpu().numpy()
        up = (sent + self.answered) * len(ids)
        count(self.experiment, state, ids, numbers(self.broadcast.values()), up, slots)


class Parts:
    """What came of a rank's clients, part by part: sums, memories and a few numbers, but no uploads."""

    def __init__(self, share: Share, cohort: SharedCohort) -> None:
        self.share, self.cohort, self.book = share, cohort, Recording()
        self.sent = 0  #: numbers that each client sends
        self._trained: list[Trained] = []
        self._slots: list[State] = []
        self._bad: list[Tensor] = []
        self._measured: list[Tensor] = []
        self._none: State = {}

    def add(self, trained: Trained, rows: np.ndarray) -> None:
        """Take in the clients in these rows of the rank's share."""
        finite = finite_rows(trained.uploads, trained.memory, {"loss": trained.loss})
        self._bad.append(torch.zeros(len(rows)) if finite is None else (~finite).cpu())
        uploads = dict(trained.uploads)
        self._none = {key: x.new_empty(0, *x.shape[1:]) for key, x in uploads.items()}  # a view would keep all
        if STATISTICS in uploads:
            self._measured.append(uploads.pop(STATISTICS))
        if finite is None:
            self._record(uploads, rows)
        self._trained.append(trained._replace(uploads={}))

    def complete(self) -> None:
        """Learn from the other ranks what this one lacks, if it has no clients; it adds zeros."""
        self._none = self.share.engine.with_keys(self._none, self.cohort)
        self.sent = self.share._sent(self._none)
        statistics = self._none.pop(STATISTICS, None)
        if not self._trained:
            self._trained.append(self.share.nobody())
            self._bad.append(torch.zeros(0))
            self._measured += [] if statistics is None else [statistics]
            self._record(self._none, np.zeros(0, np.int64))

    @property
    def table(self) -> Tensor:
        """Per client: the training loss, and whether anything of it is not finite."""
        losses = torch.cat([part.loss for part in self._trained]).cpu().double()
        return torch.stack([losses, torch.cat(self._bad).double()], 1)

    @property
    def memory(self) -> State:
        """What the clients remember from now on."""
        return {key: torch.cat([part.memory[key] for part in self._trained]) for key in self._trained[0].memory}

    @property
    def measured(self) -> Tensor | None:
        """The statistics of the clients' networks."""
        return torch.cat(self._measured) if self._measured else None

    def step(self) -> Step:
        """Add up over all ranks, and make the server's step of the sums."""
        share, cohort = self.share, self.cohort
        policies, server = share.experiment.policies, share.state.server
        sums = self.book.added(share.ranks, cohort.shares)
        step = self._rule(self._none, np.zeros(0, np.int64), sums)
        if policies.optimizer is not None:
            step = optimized(step, policies.optimizer, server, cohort.whole)
        return replace(step, slots={key: torch.cat([s[key] for s in self._slots]) for key in self._slots[0]})

    def _record(self, uploads: State, rows: np.ndarray) -> None:
        self.book.next_part()
        self._slots.append(self._rule(uploads, rows, self.book).slots)

    def _rule(self, uploads: State, rows: np.ndarray, sums: Sums) -> Step:
        """Run the server's rule on some rows."""
        share, cohort = self.share, self.cohort
        part = cohort.part(placed(rows, cohort.weights.device), sums)
        return own_step(share.method, share.state.w, share.state.server, uploads, part, share.experiment.policies)


def row_numbers(stacks: State) -> int:
    """Return how many numbers a row of each stack has."""
    return sum(int(np.prod(x.shape[1:])) for x in stacks.values())


def _table(loss: Tensor, finite: Tensor | None) -> Tensor:
    bad = torch.zeros(len(loss)) if finite is None else (~finite).cpu()
    bad = bad.bool() | ~loss.cpu().isfinite()
    return torch.stack([loss.cpu().double(), bad.double()], 1)


def _rows_of(stacks: State, rows: np.ndarray) -> State:
    return {key: x[torch.from_numpy(rows).to(x.device)] for key, x in stacks.items()}
