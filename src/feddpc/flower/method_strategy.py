"""The Flower strategy: a method's server half, screening of replies, and a checkpoint after every round.

Subclasses exchange messages with clients: with an unchanged client app (``dropin.py``), with
``feddpc.flower.client_app`` (``client_app_strategy.py``), or under secure aggregation (``secure/``).
"""

from __future__ import annotations

import datetime
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from types import FrameType
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.flower.federated_run import FederatedRun
from feddpc.flower.messages import ReplyTensors
from feddpc.flower.polling import polled
from feddpc.flower.prometheus import exported
from feddpc.flower.received import Received
from feddpc.flower.run_log import TRAINED, digest_config, naming_arguments
from feddpc.flower.screening import Refusal, VoidRoundsError, describe_void_round
from feddpc.methods.base import Cohort, State
from feddpc.round.round import RoundRecord
from feddpc.round.server_step import StepOutcome, server_step
from feddpc.runs.best_model import BestModel

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
#: What Flower's privacy wrappers call on the strategy that they wrap, before any client trains.
WRAPPER_CALLS = ("summary", "configure_train")


class MethodStrategy(FederatedRun):
    """A Flower strategy with the server half of a method: its rounds, from the invitation to the record."""

    # Flower's interface.

    def summary(self) -> None:
        """Log the settings. Flower's wrappers call this first."""
        refuse_privacy_wrappers(self)
        super().summary()

    @polled
    @exported
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run up to round ``num_rounds``, from round 1 or from the last checkpoint in ``folder``.

        With 0, the initial model is evaluated as in Flower; ``folder`` is not touched.
        """
        if num_rounds == 0:
            return super().start(grid, initial_arrays, 0, timeout, train_config, evaluate_config, evaluate_fn)
        with naming_arguments():
            try:
                self._train_config, self.evaluates_itself = digest_config(train_config), evaluate_fn is not None
                self.check_rounds(num_rounds)
                self.enroll(grid, timeout)
                self.begin(initial_arrays, num_rounds)
                self.prepare(grid)
                if self.describe(num_rounds).keep == "best":
                    past, primary = self.run_log.past, self.metrics[0]
                    self.run_log.best = BestModel(primary, self.best_round_on, self.method, self.now, past)
                done = self.offset = self.now.round
                ending = None if evaluate_fn is None else self._ending_rounds(evaluate_fn, done)
                result = super().start(
                    grid, self.arrays(), num_rounds - done, timeout, train_config, evaluate_config, ending
                )
                result.arrays = (
                    self._arrays if self.now.best is None else self.layout.record(self.now.best, self.buffers)
                )
                for t, measured in self._tested.items():
                    theirs = result.evaluate_metrics_serverapp.get(t - done, MetricRecord())
                    result.evaluate_metrics_serverapp[t - done] = MetricRecord({**measured, **theirs})
                for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
                    setattr(result, name, {t + done: metrics for t, metrics in getattr(result, name).items()})
                self.run_log.finish(self.describe(num_rounds), self.method, self.whole_model)
            finally:
                self.run_log.close()
        return result

    def _ending_rounds(self, evaluate_fn: EvaluateFn, done: int) -> EvaluateFn:
        """Return a function that evaluates the model, and then writes the round down."""

        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord | None:
            found = evaluate_fn(t + done, self.evaluated(arrays))
            measured = self.metric_values.convert(found)
            self.run_log.end_round(measured)
            return None if found is None else measured

        return evaluate

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Invite the clients of the round and send them the model."""
        self.run_log.end_round()
        self._began = time.perf_counter()
        self._time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        refuse_privacy_wrappers(self)
        self.sent = self.invite(self.offset + server_round, arrays, config, grid)
        return self.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen the replies, let the method's server rule move the model, and record the round."""
        t = self.offset + server_round
        received = self.receive(t, replies)
        usable = {received.nodes[client] for client in received.ids.tolist()}
        void = self._void_reason(t, received)
        outcome = self.step(t, received)
        void = received.refuse_rejected(t, outcome, self.min_replies, self._excess(t, received, outcome)) or void
        ids = received.ids[outcome.kept.numpy()]
        loss, metrics = self.summarize(received, ids, outcome) if len(ids) else (float("nan"), {})
        notes = self.now.apply(self.method, outcome, ids) | received.notes
        self.mark_accepted(t, ids, received.nodes)
        quarantined = self._update_quarantine(t, usable, received.refused)
        if quarantined:
            received.facts["quarantined"] = quarantined
        if self.policies.privacy is not None:
            self.run_log.release(t)
        record = self._record_round(t, ids, received, void, loss, notes, metrics)
        if void or not (len(ids) or self.reports_empty_rounds):
            return None, None
        return self.arrays(), MetricRecord({"replies": len(ids), **record.notes, **metrics})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what clients measured; if the server does not evaluate afterwards, the round ends."""
        found = self.read_evaluations(self.offset + server_round, replies)
        measured = self.metric_values.convert(found)
        self.run_log.clients_measured = measured
        if not self.evaluates_itself:
            self.run_log.end_round()
        return None if found is None else measured

    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> Iterable[Message]:
        """Make one message per node; its group is the round, which Flower copies into every reply."""
        group = str(record[self.configrecord_key]["server-round"])
        return [Message(record, node, message_type, group_id=group) for node in node_ids]

    # Before the first round.

    def enroll(self, grid: Grid, timeout: float) -> None:
        """Find out which clients are connected, before any file is read or written."""

    def check_rounds(self, rounds: int) -> None:
        """Raise if what was set up counts on another number of rounds."""

    def prepare(self, grid: Grid) -> None:
        """Do what has to be done before the first round of this process."""

    # Every round.

    @abstractmethod
    def invite(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return the training messages of round ``t``."""

    @abstractmethod
    def receive(self, t: int, replies: Iterable[Message]) -> Received:
        """Screen the replies of round ``t``."""

    @abstractmethod
    def cohort(self, t: int, ids: Ints) -> Cohort:
        """Return what the server knows about clients ``ids`` in round ``t``."""

    @abstractmethod
    def rows(self, received: Received) -> Mapping[str, ReplyTensors]:
        """Return the uploads by name, each with one row per client."""

    @property
    def streams(self) -> bool:
        """Whether the server takes uploads one at a time; robust rules and privacy need all of them at once."""
        defense = self.policies.defense
        guarded = self.policies.privacy is not None or (defense is not None and defense.rule is not None)
        return getattr(self.method, "form", None) == "streaming" and not guarded

    def stack(self, received: Received) -> State:
        """Return the uploads as the method's server rule takes them: stacked, or one at a time."""
        rows = self.rows(received)
        return rows if self.streams else {key: torch.stack(list(row)) for key, row in rows.items()}  # type: ignore[return-value]

    def step(self, t: int, received: Received) -> StepOutcome:
        """Return the server's step; without clients, that of an empty round."""
        uploads = self.stack(received) if len(received.ids) else {}
        state, cohort, policies = self.now, self.cohort(t, received.ids), self.policies
        outcome = server_step(
            self.method, state.w, state.server, uploads, cohort, policies, state.watched, minimum=self.min_replies
        )
        state.watched = outcome.watched
        if policies.faults is not None and outcome.step is not None and len(outcome.kept):
            state.watched = policies.faults.saw(outcome.step.update, state.watched)
        return outcome

    @abstractmethod
    def summarize(self, received: Received, ids: Ints, outcome: StepOutcome) -> tuple[float, Mapping[str, Any]]:
        """Return training loss and metrics of a round in which clients ``ids`` count, before the model moves."""

    def evaluate(self, t: int, w: Tensor) -> dict[str, float | None]:
        """Return the metrics of the model after round ``t`` as a record names them, None where none was measured."""
        return {}

    @abstractmethod
    def read_evaluations(self, t: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the average of what clients measured after round ``t``; None if nothing can be averaged."""

    # The end of a round.

    def _void_reason(self, t: int, received: Received) -> str | None:
        """Return why a round whose clients should have answered does not count; None if it does.

        If too few replies can be used, no client is left in ``received``, and those that could be used are refused.
        """
        void = received.void
        if void is None and len(received.ids) < self.min_replies:
            received.refuse(t, received.ids, f"it could be used, but fewer than {self.min_replies} could")
            void = f"fewer than {self.min_replies} replies can be used"
        if void is not None:
            received.ids = received.ids[:0]
        return void if received.expected else None

    def _excess(self, t: int, received: Received, outcome: StepOutcome) -> dict[int, str]:
        """Return how far replies are beyond the bound on norms, by their place in the cohort."""
        defense, screened = self.policies.defense, outcome.screened
        if defense is None or screened is None or not bool(screened.any()):
            return {}
        return defense.explain(self.cohort(t, received.ids).steps != 0, outcome.watched)

    def _update_quarantine(self, t: int, usable: set[int], refused: list[Refusal]) -> list[int]:
        """Learn whose replies of round ``t`` were refused for a fault of their own; return the nodes not asked in it.

        A checkpoint has what is known.
        """
        if self.quarantine is None:
            return []
        asked = usable | {refusal.node for refusal in refused}
        out = sorted(self.quarantine.excluded(t) - asked)
        bad = {refusal.node: refusal.reason for refusal in refused if refusal.faulty}
        self.quarantine.saw(t, usable - bad.keys(), bad)
        self.now.watched = self.quarantine.stored(self.now.watched)
        return out

    def _record_round(
        self,
        t: int,
        ids: Ints,
        received: Received,
        void: str | None,
        loss: float,
        notes: Mapping[str, float],
        trained: Mapping[str, Any],
    ) -> RoundRecord:
        """Record round ``t``, in which clients ``ids`` count; it is written when the round ends.

        ``void`` says why none counts although clients were expected to answer; too many such rounds in a row raise.
        """
        refused, dropped = received.refused, sorted(received.dropped)
        why = f"round {t}: {void}: {describe_void_round(refused, dropped)}"
        rejected = sorted({r.client for r in refused if r.client is not None} - set(ids.tolist()))
        refused, self.run_log.pending = self.run_log.pending + refused, []
        self.now.round = t
        nodes = received.asked_nodes(ids.tolist(), rejected, dropped)
        facts: dict[str, Any] = {"time": self._time, "nodes": nodes, **received.facts}
        if self.reports_training:
            facts |= {f"{TRAINED}{name}": value for name, value in trained.items()}
        tested = self.evaluate(t, self.method.evaluated(self.now.w, self.now.server))
        known = {key.removeprefix("test_"): value for key, value in tested.items() if value is not None}
        if known:
            self._tested[t] = known
        record = RoundRecord(
            round=t,
            metrics=tested,
            train_loss=loss,
            seconds=time.perf_counter() - self._began,
            participants=ids.tolist(),
            dropped=dropped,
            rejected=rejected,
            notes={**notes, "refused": float(len(refused))},
            faults=received.faults,
            federation=facts,
        )
        self.run_log.add(record, refused)
        if len(ids):
            self._void.forget()
        else:
            log(WARNING, "round %d: no reply counts%s", t, f": {void}" if void else "")
        if void is not None:
            self._void.add(why)
            try:
                self._void.check(self.folder)
            except VoidRoundsError:
                self.run_log.end_round()
                raise
        return record


def refuse_privacy_wrappers(strategy: Strategy) -> None:
    """Raise if a Flower wrapper for differential privacy calls ``strategy``.

    Such a wrapper clips the replies and adds noise for that length. A method that stretches updates afterwards (FedDPC
    by up to 1 + lambda), or stores them without noise, makes the noise too small for the promised epsilon. A wrapper
    does not tell the strategy that it is there, but it is among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only the locals of these functions are read: reading others would keep replies in memory.
        caller = frame.f_locals.get("self") if frame.f_code.co_name in WRAPPER_CALLS else None
        if isinstance(caller, Strategy) and caller is not strategy and _adds_noise(caller):
            raise BadInputError(
                f"{type(caller).__name__} around {type(strategy).__name__}: it clips what clients send, and the method "
                "changes the length of the updates afterwards, so the noise would be too small for the promised "
                "epsilon. Give the strategy privacy={...}, which clips after the method, or wrap Flower's own FedAvg"
            )
        frame = frame.f_back


def _adds_noise(strategy: Strategy) -> bool:
    """Return whether a strategy is one of Flower's wrappers for differential privacy, or is written like them."""
    names = (cls.__name__ for cls in type(strategy).__mro__)
    return hasattr(strategy, "noise_multiplier") or any(name.startswith("DifferentialPrivacy") for name in names)
