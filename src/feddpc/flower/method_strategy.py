"""The Flower strategy: a method's server half, screening of replies, and a checkpoint after every round.

Subclasses exchange messages with clients: with an unchanged client app (``dropin.py``), with
``feddpc.flower.client_app`` (``client_app_strategy.py``), or under secure aggregation (``secure/``).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor

from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.flower.layout import Layout
from feddpc.flower.messages import NEVER, ReplyTensors, cast_note, unpack
from feddpc.flower.screening import Bounds, Refusal, VoidRoundsError, describe_void_round
from feddpc.methods.base import Cohort, Method, State
from feddpc.policies import Policies
from feddpc.round.client_table import ClientTable
from feddpc.round.round import RoundRecord
from feddpc.round.server_step import StepOutcome, server_step
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import AppendLog
from feddpc.runs.record import RunFolder, environment, is_run, line, summarize
from feddpc.runs.runner import BestModel, fingerprint, reopen
from feddpc.tasks.metrics import CLASSIFICATION, Metric, named

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
#: The file of a run folder that lists the replies that did not count.
REFUSALS = "refused.jsonl"


@dataclass
class Received:
    """The replies of a round after screening."""

    ids: Ints  #: clients whose replies can be used, in rising order
    nodes: Mapping[int, int]  #: node of every client
    refused: list[Refusal]
    dropped: set[int]  #: invited clients without a reply
    uploads: list[RecordDict]  #: of ``ids``, checked; empty if only their mean is known
    expected: bool = True  #: whether a round without replies is an error, and not a draw of no clients
    void: str | None = None  #: why the round does not count, if that is known already
    faults: dict[str, list[int]] = field(default_factory=dict)  #: simulated faults, and the clients that had them
    notes: dict[str, float] = field(default_factory=dict)  #: what else is reported about the round

    def refuse(self, t: int, clients: Ints, reason: str) -> None:
        """List replies of round ``t`` that could be read, but do not count."""
        self.refused += [Refusal(t, self.nodes.get(client, 0), client, reason) for client in clients.tolist()]


class MethodStrategy(FedAvg):
    """A Flower strategy with the server half of ``method``.

    Args:
        method: the method.
        bounds: what a reply may say.
        min_replies: number of usable replies that a round needs to count. With fewer the round is void: the model and
            the memories of clients stay, and the method's ``on_empty_round`` is called.
        max_void_rounds: number of void rounds in a row that ends a run.
        folder: where records and, after every round, a checkpoint go; a run that is there is continued.
        flower: arguments of Flower's own ``FedAvg``: sampling, evaluation, names of records.
    """

    population: int  #: how many clients there are
    policies = Policies()
    reports_empty_rounds = True  #: whether a round without invited clients has metrics; in Flower's FedAvg it has none
    metrics: tuple[Metric, ...] = CLASSIFICATION  #: what an evaluation measures, the primary one first
    best_round_on = "test"  #: the samples of the server that say which round is best: test or validation

    def __init__(
        self,
        method: Method,
        *,
        bounds: Bounds,
        min_replies: int,
        max_void_rounds: int,
        folder: str | Path | None,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        self.method, self.bounds = method, bounds
        self.min_replies = check_int("min_replies", min_replies, 1)
        self.max_void_rounds = check_int("max_void_rounds", max_void_rounds, 1)
        self.folder = Path(folder) if folder is not None else None
        self.records: list[RoundRecord] = []  #: of the rounds of this process
        self.refusals: list[Refusal] = []  #: every reply that did not count, with its node and the reason
        self.pending: list[Refusal] = []  #: those of evaluations and before round 1, for the next record
        self.buffers: dict[str, Array] = {}  #: arrays of the model that are not trained
        self.state: RunState | None = None
        self._layout: Layout | None = None
        self._run: RunFolder | None = None
        self._refusal_log: AppendLog | None = None
        self._past: list[dict[str, Any]] = []  # records of rounds before a restart
        self.offset = self.last_round = 0  #: rounds before this process, and the round with which the run ends
        self._arrays = ArrayRecord()
        self._best: BestModel | None = None
        self._void: list[str] = []  # the void rounds since the last one that counted, with their reasons
        self._cast_logged = False
        self.sent: list[Message] = []
        self._began = 0.0

    # Flower's interface.

    def summary(self) -> None:
        """Log the settings. Flower's wrappers call this first."""
        refuse_privacy_wrappers(self)
        super().summary()

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
        """Run up to round ``num_rounds``, from round 1 or from the last checkpoint in ``folder``."""
        try:
            self.check_rounds(num_rounds)
            self.enroll(grid, timeout)
            self.begin(initial_arrays, num_rounds)
            self.prepare(grid)
            if self.describe(num_rounds).keep == "best":
                self._best = BestModel(self.metrics[0], self.best_round_on, self.method, self.now, self._past)
            done = self.offset = self.now.round
            shifted = None if evaluate_fn is None else lambda t, arrays: evaluate_fn(t + done, self.evaluated(arrays))
            result = super().start(
                grid, self.arrays(), num_rounds - done, timeout, train_config, evaluate_config, shifted
            )
            result.arrays = self._arrays if self.now.best is None else self.layout.record(self.now.best, self.buffers)
            for t, measured in self._measured(done).items():
                theirs = result.evaluate_metrics_serverapp.get(t, MetricRecord())
                result.evaluate_metrics_serverapp[t] = MetricRecord({**measured, **theirs})
            for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
                setattr(result, name, {t + done: metrics for t, metrics in getattr(result, name).items()})
            self._finish(num_rounds)
        finally:
            if self._run is not None:
                self._run.close()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Invite the clients of the round and send them the model."""
        self._began = time.perf_counter()
        refuse_privacy_wrappers(self)
        self.sent = self.invite(self.offset + server_round, arrays, config, grid)
        return self.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen the replies, let the method's server rule move the model, and record the round."""
        t = self.offset + server_round
        received = self.receive(t, replies)
        void = self._void_reason(t, received)
        outcome = self.step(t, received)
        kept = outcome.kept.numpy()
        reason = "its update is much longer than usual, or the rule did not choose it"
        if len(kept) and outcome.step is None:
            void = reason = f"fewer than {self.min_replies} updates are within the bound on norms"
        received.refuse(t, received.ids[~kept], reason)
        ids = received.ids[kept]
        loss, metrics = self.summarize(received, ids, outcome) if len(ids) else (float("nan"), {})
        notes = self.now.apply(self.method, outcome, ids) | received.notes
        self.mark_accepted(t, ids, received.nodes)
        record = self._record_round(t, ids, received, void, loss, notes)
        if void or not (len(ids) or self.reports_empty_rounds):
            return None, None
        return self.arrays(), MetricRecord({**metrics, "replies": len(ids), **record.notes})

    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> Iterable[Message]:
        """Make one message per node; its group is the round, which Flower copies into every reply."""
        group = str(record[self.configrecord_key]["server-round"])
        return [Message(record, node, message_type, group_id=group) for node in node_ids]

    # Before the first round.

    @abstractmethod
    def describe(self, rounds: int) -> Config:
        """Return the configuration that a run folder shows."""

    def initial_arrays(self) -> ArrayRecord:
        """Return the first model, if the strategy knows it."""
        raise BadInputError("this strategy does not know the model: give start() the arrays of the first one")

    def enroll(self, grid: Grid, timeout: float) -> None:
        """Find out which clients are connected, before any file is read or written."""

    def check_rounds(self, rounds: int) -> None:
        """Raise if what was set up counts on another number of rounds."""

    def prepare(self, grid: Grid) -> None:
        """Do what has to be done before the first round of this process."""

    def run_notes(self) -> dict[str, dict[str, Any]]:
        """Return what a run folder says once, by file name; ``privacy`` says what leaves a client."""
        return {"privacy": {"note": self.method.privacy, "disclosed": {}}}

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return how the first model's arrays map to its vector."""
        return Layout(arrays)

    def model_tag(self) -> str:
        """Return a short name for the model: a run is continued only with the same one."""
        return self.layout.tag

    def whole_model(self, w: Tensor) -> State:
        """Return all that the file of a model holds."""
        return unpack(self.layout.record(w, self.buffers))

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
        """Whether the server takes uploads one at a time; a defense and privacy need all of them at once."""
        guarded = self.policies.privacy is not None or self.policies.defense is not None
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
        return named("test", self.metrics, {})

    # The model and the run.

    @property
    def now(self) -> RunState:
        """The state of the run."""
        assert self.state is not None, "the strategy has not begun"
        return self.state

    @property
    def layout(self) -> Layout:
        """How the model's arrays map to its vector."""
        assert self._layout is not None, "the strategy has not begun"
        return self._layout

    def arrays(self) -> ArrayRecord:
        """Return the present model as Flower's arrays."""
        self._arrays = self.layout.record(self.now.w, self.buffers)
        return self._arrays

    def evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to evaluate, which for some methods is another than the one that is trained."""
        w = self.method.evaluated(self.now.w, self.now.server)
        return arrays if w is self.now.w else self.layout.record(w, self.buffers)

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Set the first model, or take the state from ``folder`` if a run is there."""
        self.records, self.refusals, self._past = [], [], []
        self.last_round = num_rounds
        self._void, self._cast_logged = [], False
        self._layout = self.make_layout(arrays)
        self.reset(self.read_model(arrays))
        self._arrays = arrays
        if self.folder is not None:
            self._open_folder(self.folder, num_rounds)

    def set_model(self, arrays: ArrayRecord) -> None:
        """Take a model from outside, if it is another one; the method's state stays."""
        if arrays is not self._arrays:
            self.now.w, self._arrays = self.read_model(arrays), arrays

    def reset(self, w: Tensor) -> None:
        """Set the state before round 1, with the model ``w``. Per client: its node, and the last round that counted."""
        self.state = RunState.begin(self.method, w, self.population, optimizer=self.policies.optimizer)
        fresh = {"node": torch.zeros((), dtype=torch.int64), "accepted": torch.full((), NEVER)}
        self.state.clients = ClientTable(lambda: fresh, "the server's record of a client", self.population)

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return a whole model, not an update, as a vector; refuse one that is not finite."""
        w = self.layout.vector(arrays)
        for name, (a, b) in self.layout.spans.items():
            if not bool(w[a:b].isfinite().all()):
                raise BadInputError(f"array {name!r} of the model is not finite: start from finite weights")
        return w

    def _open_folder(self, folder: Path, num_rounds: int) -> None:
        config, about = self.describe(num_rounds), {"model": self.model_tag()}
        if is_run(folder):
            self._run, self._past, _ = reopen(folder, config, self.now, about)
            log(INFO, "continuing %s after round %d", folder, self.now.round)
        else:
            self._run = RunFolder.create(folder)
            self._run.note("environment", environment("flower", {}, "cpu", fingerprint(about, config), self.metrics))
            for name, note in self.run_notes().items():
                self._run.note(name, note)
            self._run.begin(config)
        self._refusal_log = self._run.lines(REFUSALS)

    def _measured(self, done: int) -> dict[int, MetricRecord]:
        """Return what the server measured on its own test set, by the rounds of this process."""
        measured = {}
        for record in self.records:
            known = {k.removeprefix("test_"): v for k, v in record.metrics.items() if v is not None}
            if known:
                measured[record.round - done] = MetricRecord({**known})
        return measured

    # The end of a round.

    def mark_accepted(self, t: int, ids: Ints, nodes: Mapping[int, int] | None = None) -> None:
        """Store that the replies of clients ``ids`` counted in round ``t``; clients learn it with the next message.

        ``nodes`` are those of the clients, where they are known.
        """
        of = np.zeros(len(ids), np.int64)
        if nodes is not None:  # torch stores signed numbers
            of = np.array([nodes[int(client)] for client in ids], np.uint64).view(np.int64)
        self.now.clients.write(ids, {"node": torch.from_numpy(of), "accepted": torch.full((len(ids),), t)})

    def log_cast(self, arrays: ArrayRecord, dtypes: Mapping[str, str]) -> None:
        """Log once per run that replies come in another floating type than the model's."""
        if not self._cast_logged and (note := cast_note(arrays, dtypes)) is not None:
            self._cast_logged = True
            log(WARNING, "%s. Every reply in another floating type is cast; this is logged once per run", note)

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

    def _record_round(
        self,
        t: int,
        ids: Ints,
        received: Received,
        void: str | None,
        loss: float,
        notes: Mapping[str, float],
    ) -> RoundRecord:
        """Record round ``t``, in which clients ``ids`` count, and save the state.

        ``void`` says why none counts although clients were expected to answer; too many such rounds in a row raise.
        """
        refused, dropped = received.refused, sorted(received.dropped)
        why = f"round {t}: {void}: {describe_void_round(refused, dropped)}"
        rejected = {r.client for r in refused if r.client is not None} - set(ids.tolist())
        refused, self.pending = self.pending + refused, []
        self.refusals += refused
        self.now.round = t
        record = RoundRecord(
            round=t,
            metrics=self.evaluate(t, self.method.evaluated(self.now.w, self.now.server)),
            train_loss=loss,
            seconds=time.perf_counter() - self._began,
            participants=ids.tolist(),
            dropped=dropped,
            rejected=sorted(rejected),
            notes={**notes, "refused": float(len(refused))},
            faults=received.faults,
        )
        self.records.append(record)
        if self._best is not None:
            self._best.see(json.loads(line(record)), record.diverged)
        if self._run is not None:
            self._run.append(record)
            self._run.records.sync()
            self._save(self._run, refused)
        if len(ids):
            self._void = []
        else:
            log(WARNING, "round %d: no reply counts%s", t, f": {void}" if void else "")
        if void is not None:
            self._void.append(why)
            self._stop_if_void()
        return record

    def _stop_if_void(self) -> None:
        if len(self._void) < self.max_void_rounds:
            return
        begin = "start again" if self.folder is None else f"start again with folder = {str(self.folder)!r} to continue"
        raise VoidRoundsError(
            f"no reply counted in {len(self._void)} rounds in a row (max_void_rounds = {self.max_void_rounds}): "
            f"{' | '.join(self._void)}. Remove the cause and {begin}, or raise max_void_rounds"
        )

    def _save(self, run: RunFolder, refused: list[Refusal]) -> None:
        """Write refusals, and then a checkpoint with the lengths of the files; without it, they do not count."""
        assert self._refusal_log is not None
        if refused:
            self._refusal_log.append("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in refused).encode())
            self._refusal_log.sync()
        checkpoint.save(run.checkpoint, self.now, run.records.mark, beside={REFUSALS: self._refusal_log.mark})

    def _finish(self, num_rounds: int) -> None:
        last, self.pending = self.pending, []
        self.refusals += last
        if self._run is None:
            return
        if last:
            self._save(self._run, last)
        records = self._past + [json.loads(line(record)) for record in self.records]
        summary = summarize(self.describe(num_rounds), records, "finished", None, self.metrics)
        kept = self.method.evaluated(self.now.w, self.now.server)
        if self._best is not None and self.now.best is not None:
            kept, summary["model_round"] = self.now.best, self._best.round
        checkpoint.save_model(self._run.path / "model.safetensors", self.whole_model(kept))
        self._run.finish(summary)


#: What Flower's privacy wrappers call on the strategy that they wrap, before any client trains.
WRAPPER_CALLS = ("summary", "configure_train")


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
                "epsilon. Use feddpc.flower.strategy(..., privacy={...}) with feddpc.flower.client_app, which clips "
                "after the method, or wrap Flower's own FedAvg"
            )
        frame = frame.f_back


def _adds_noise(strategy: Strategy) -> bool:
    """Return whether a strategy is one of Flower's wrappers for differential privacy, or is written like them."""
    names = (cls.__name__ for cls in type(strategy).__mro__)
    return hasattr(strategy, "noise_multiplier") or any(name.startswith("DifferentialPrivacy") for name in names)
