"""What all strategies here share: a method's server half behind Flower's interface, kept after every round."""

from __future__ import annotations

import dataclasses
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray
from torch import Tensor

from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.screening import Bounds, Refusal, VoidRoundsError, alike, describe_void_round, sift
from feddpc.flower.wire import Layout, cast_note, only_record
from feddpc.flower.wrappers import refuse_privacy_wrappers
from feddpc.methods.base import Method, State
from feddpc.round.client_table import ClientTable
from feddpc.round.round import RoundRecord
from feddpc.round.server_step import StepOutcome
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import AppendLog
from feddpc.runs.record import RunFolder, environment, is_run, line, summarize
from feddpc.runs.runner import fingerprint, reopen

Ints = NDArray[np.int64]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
#: Who is behind a client's row of the server's memory, and the last round in which its reply counted (-1: none yet).
NEVER = -1
#: Where a run folder lists the replies that did not count.
REFUSALS = "refused.jsonl"


class MethodStrategy(FedAvg):
    """A Flower strategy with the server half of ``method``.

    Args:
        method: the method.
        bounds: what a reply may say.
        min_replies: how many replies must be usable for a round to count; else the round is void: the model and the
            memories of clients stay as they are, and the method is told that nothing came (``idle``).
        max_void_rounds: how many void rounds in a row end a run.
        folder: where records and, after every round, a checkpoint go; a run that is there is continued.
        flower: arguments of Flower's own ``FedAvg``: sampling, evaluation, names of records.
    """

    def __init__(
        self,
        method: Method,
        *,
        bounds: Bounds,
        min_replies: int,
        max_void_rounds: int,
        folder: str | Path | None,
        flower: dict[str, Any],
    ) -> None:
        super().__init__(**flower)
        self.method, self.bounds = method, bounds
        self.min_replies = check_int("min_replies", min_replies, 1)
        self.max_void_rounds = check_int("max_void_rounds", max_void_rounds, 1)
        self.folder = Path(folder) if folder is not None else None
        self.records: list[RoundRecord] = []  #: of the rounds of this process
        self.refusals: list[Refusal] = []  #: every reply that did not count, with its node and the reason
        self.pending: list[Refusal] = []  #: those of evaluations and before round 1, for the next record
        self.progress: RunState | None = None
        self._layout: Layout | None = None
        self._run: RunFolder | None = None
        self._listed: AppendLog | None = None  # the refusals in the folder
        self._past: list[dict[str, Any]] = []  # records of rounds before a restart
        self._offset = 0
        self._arrays = ArrayRecord()
        self._buffers: dict[str, Array] = {}  # arrays of the model that are not trained
        self._void: list[str] = []  # the void rounds since the last one that counted, with their reasons
        self._cast_logged = False
        self._sent: list[Message] = []
        self._began = 0.0

    # What the two kinds do differently.

    @abstractmethod
    def describe(self, rounds: int) -> Config:
        """Return the configuration that a run folder shows."""

    @abstractmethod
    def population(self) -> int:
        """Return how many clients there are."""

    def welcome(self, grid: Grid, timeout: float) -> None:
        """Find out who is there, before anything is read or written."""

    def prepare(self, grid: Grid) -> None:
        """Do what has to be done before the first round of this process."""

    def about(self) -> dict[str, dict[str, Any]]:
        """Return what a run folder says once, by the names of the files."""
        return {"privacy": {"note": self.disclosure(), "disclosed": {}}}

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return how the first model lies in its vector."""
        return Layout(arrays)

    def scored(self) -> tuple[float, float]:
        """Return accuracy and loss of the present model on the server's test set."""
        return float("nan"), 0.0

    def disclosure(self) -> str:
        """Say what leaves a client."""
        return self.method.privacy

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
        """Run up to round ``num_rounds``, from the first one or from where the run in ``folder`` was."""
        try:
            self.welcome(grid, timeout)
            self.begin(initial_arrays, num_rounds)
            self.prepare(grid)
            done = self._offset = self.now.round
            shifted = None if evaluate_fn is None else lambda t, arrays: evaluate_fn(t + done, self.evaluated(arrays))
            result = super().start(
                grid, self.arrays(), num_rounds - done, timeout, train_config, evaluate_config, shifted
            )
            result.arrays = self._arrays
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

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model that the method's authors look at."""
        t = self._offset + server_round
        self._sent = list(super().configure_evaluate(t, self.evaluated(arrays), config, grid))
        return self._sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what clients measured; each reply is screened on its own."""
        t = self._offset + server_round
        nodes = {m.metadata.dst_node_id: i for i, m in enumerate(self._sent)}

        def read(_: int, content: RecordDict) -> RecordDict:
            self.bounds.examples(only_record(content, MetricRecord).get(self.weighted_by_key))
            return content

        good, refused = sift(replies, self._sent, nodes, t, read)
        self.pending += refused
        usable = alike(list(good.values()))
        return self.evaluate_metrics_aggr_fn(usable, self.weighted_by_key) if usable else None

    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> Iterable[Message]:
        """Make one message a node; the group says the round, and Flower writes it into every reply."""
        group = str(record[self.configrecord_key]["server-round"])
        return [Message(record, node, message_type, group_id=group) for node in node_ids]

    # The life of a run.

    @property
    def now(self) -> RunState:
        """Where the run stands."""
        assert self.progress is not None, "the strategy has not begun"
        return self.progress

    @property
    def layout(self) -> Layout:
        """How the model's arrays lie in its vector."""
        assert self._layout is not None, "the strategy has not begun"
        return self._layout

    def arrays(self) -> ArrayRecord:
        """Return the present model as Flower's arrays."""
        self._arrays = self.layout.record(self.now.w, self._buffers)
        return self._arrays

    def evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that is evaluated, which for some methods is another than the one that is trained."""
        w = self.method.evaluated(self.now.w, self.now.server)
        return arrays if w is self.now.w else self.layout.record(w, self._buffers)

    def begin(self, arrays: ArrayRecord, rounds: int) -> None:
        """Set the first model, or take the state from ``folder`` if a run is there."""
        self.records, self.refusals, self._past = [], [], []
        self._void, self._cast_logged = [], False
        self._layout = self.make_layout(arrays)
        self.reset(self.read_model(arrays))
        self._arrays = arrays
        if self.folder is None:
            return
        config, about = self.describe(rounds), {"model": self.layout.tag}
        if is_run(self.folder):
            self._run, self._past, _ = reopen(self.folder, config, self.now, about)
            log(INFO, "continuing %s after round %d", self.folder, self.now.round)
        else:
            self._run = RunFolder.create(self.folder)
            self._run.note("environment", environment("flower", {}, "cpu", fingerprint(about, config)))
            for name, told in self.about().items():
                self._run.note(name, told)
            self._run.begin(config)
        self._listed = self._run.lines(REFUSALS)

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return a whole model, not an update, as a vector; refuse one that is not finite."""
        w = self.layout.vector(arrays)
        for name, (a, b) in self.layout.spans.items():
            if not bool(w[a:b].isfinite().all()):
                raise BadInputError(f"array {name!r} of the model is not finite: start from finite weights")
        return w

    def reset(self, w: Tensor) -> None:
        """Stand before round 1 with the model ``w``."""
        population = self.population()
        self.progress = RunState.begin(self.method, w, population)
        fresh = {"node": torch.zeros((), dtype=torch.int64), "accepted": torch.full((), NEVER)}
        self.progress.clients = ClientTable(lambda: fresh, "what the server knows of a client", population)

    def _measured(self, done: int) -> dict[int, MetricRecord]:
        """Return what the server measured on its own test set, by the rounds of this process."""
        measured = [r for r in self.records if np.isfinite(r.test_accuracy)]
        return {r.round - done: MetricRecord({"accuracy": r.test_accuracy, "loss": r.test_loss}) for r in measured}

    def keep(
        self,
        t: int,
        kept: Ints,
        dropped: Iterable[int],
        refused: list[Refusal],
        *,
        void: str | None = None,
        **more: Any,
    ) -> RoundRecord:
        """Close round ``t``: write it down, and the state after it.

        ``void`` says why no reply counts although clients were asked. Too many such rounds in a row raise an error.
        """
        why = "" if void is None else f"round {t}: {void}: {describe_void_round(refused, sorted(dropped))}"
        rejected = {r.client for r in refused if r.client is not None} - set(kept.tolist())
        refused, self.pending = self.pending + refused, []
        self.refusals += refused
        self.now.round = t
        accuracy, loss = self.scored()
        record = RoundRecord(
            round=t,
            test_accuracy=accuracy,
            test_loss=loss,
            train_loss=more.get("loss", float("nan")),
            seconds=time.perf_counter() - self._began,
            participants=kept.tolist(),
            dropped=sorted(dropped),
            rejected=sorted(rejected),
            notes={**more.get("notes", {}), "refused": float(len(refused))},
            faults=more.get("faults", {}),
        )
        self.records.append(record)
        if self._run is not None:
            self._write(self._run, record, refused)
        if len(kept):
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

    def no_quorum(self) -> str:
        """Return why a round is void in which too few replies can be used."""
        return f"fewer than {self.min_replies} replies can be used"

    def log_cast(self, arrays: ArrayRecord, dtypes: Mapping[str, str]) -> None:
        """Log once per run that replies come in another floating type than the model's."""
        if not self._cast_logged and (note := cast_note(arrays, dtypes)) is not None:
            self._cast_logged = True
            log(WARNING, "%s. Every reply in another floating type is cast; this is logged once per run", note)

    def _write(self, run: RunFolder, record: RoundRecord, refused: list[Refusal]) -> None:
        """Bring a round to the disk; it counts when the checkpoint that names its marks is there."""
        assert self._listed is not None
        run.append(record)
        run.records.sync()
        self._list(run, refused)

    def _list(self, run: RunFolder, refused: list[Refusal]) -> None:
        """Write refusals down, and a checkpoint that vouches for them."""
        assert self._listed is not None
        if refused:
            self._listed.append("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in refused).encode())
            self._listed.sync()
        checkpoint.save(run.checkpoint, self.now, run.records.mark, beside={REFUSALS: self._listed.mark})

    def chosen(
        self, t: int, ids: Ints, served: StepOutcome | None, nodes: dict[int, int]
    ) -> tuple[Ints, list[Refusal]]:
        """Return whose updates the server took, and the others as refusals; ``nodes`` are the clients'."""
        if served is None:
            reason, good = self.no_quorum_within_bound(), np.zeros(len(ids), bool)
        else:
            reason, good = "its update is much longer than usual, or the rule did not choose it", served.good.numpy()
        return ids[good], [Refusal(t, nodes[client], client, reason) for client in ids[~good].tolist()]

    def no_quorum_within_bound(self) -> str:
        """Return why a round is void in which too many updates are too long."""
        return f"fewer than {self.min_replies} updates are within the bound on norms"

    def accept(self, t: int, kept: Ints, nodes: dict[int, int]) -> None:
        """Remember whose replies counted in round ``t``; a client learns it the next time it is asked."""
        ids = torch.tensor([_signed(nodes[int(c)]) for c in kept], dtype=torch.int64)
        self.now.clients.write(kept, {"node": ids, "accepted": torch.full((len(kept),), t)})

    def _finish(self, rounds: int) -> None:
        last, self.pending = self.pending, []
        self.refusals += last
        if self._run is None:
            return
        if last:
            self._list(self._run, last)
        records = self._past + [json.loads(line(record)) for record in self.records]
        checkpoint.save_model(self._run.path / "model.safetensors", self._named(self.now.w))
        self._run.finish(summarize(self.describe(rounds), records, "finished", None))

    def _named(self, w: Tensor) -> State:
        named = {name: w[a:b].reshape(self.layout.shapes[name]) for name, (a, b) in self.layout.spans.items()}
        named |= {name: torch.from_numpy(np.array(array.numpy())) for name, array in self._buffers.items()}
        return {name: named[name] for name in self.layout.names}


def _signed(node: int) -> int:
    """Return a node's id, 64 bits without sign, as a number with one."""
    return node - (1 << 64) if node >> 63 else node
