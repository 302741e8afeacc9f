"""The folder of a federation's run: records, refused replies, checkpoints and summary, with the run continued in it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from torch import Tensor

from feddpc.config import Config
from feddpc.errors import RunFolderError
from feddpc.flower.screening import Refusal
from feddpc.methods.base import Method, State
from feddpc.round.round import RoundRecord
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import AppendLog
from feddpc.runs.best_model import BestModel
from feddpc.runs.environment import environment
from feddpc.runs.record import RunFolder, is_run, line, read_json
from feddpc.runs.reopen import fingerprint, reopen
from feddpc.runs.stored import read_metrics
from feddpc.runs.summary import summarize
from feddpc.tasks.metrics import CLASSIFICATION, Metric, guess_metrics, named

#: A function of what server and clients measured.
TestValues = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
#: The file of a run folder that lists the replies that did not count.
REFUSALS = "refused.jsonl"
#: How the names of what clients measured begin in a record: while they trained, and in evaluations.
TRAINED, EVALUATED = "clients_train_", "clients_evaluate_"
#: The file, ``.json``, that says which private models left the server.
RELEASES = "releases"
#: The part of the fingerprint that says which weights a run begins with.
INITIAL = "initial weights"
#: What messages about run folders call the arguments of commands, and what they are called here.
ARGUMENTS = {
    "add --resume to continue it, or choose another --out": "choose another folder=",
    "leave out --resume": "choose another folder=",
    "use --resume": "start again with the same folder=",
    "another --out": "another folder=",
    "--out": "folder=",
}


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """Let errors about a run folder name the arguments of a strategy, and not those of a command."""
    try:
        yield
    except RunFolderError as error:
        text = str(error)
        for command, argument in ARGUMENTS.items():
            text = text.replace(command, argument)
        if f"other {INITIAL}" in text:
            text += (
                "; if these are the weights of the same experiment, made without a seed, check_initial_arrays=False "
                "continues the stored run"
            )
        if text == str(error):
            raise
        raise type(error)(text) from error


def digest_arrays(arrays: ArrayRecord) -> str:
    """Return a hash of a whole model: names, types, shapes and numbers."""
    found = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        found.update(array.data)
    return found.hexdigest()


def digest_config(config: ConfigRecord | None) -> str:
    """Return a hash of what clients are told in every round, without what a strategy adds to it.

    >>> digest_config(None) == digest_config(ConfigRecord({"server-round": 3})) != digest_config(ConfigRecord({"a": 1}))
    True
    """
    values = {key: repr(value) for key, value in (config or {}).items() if key != "server-round"}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def summarize_federation(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a summary says about clients: their last metrics, their nodes, and when the run took place."""
    if not records:
        return {}
    names = dict.fromkeys(key for record in records for key in record if key.startswith((TRAINED, EVALUATED)))
    last = {name: next(r[name] for r in reversed(records) if name in r) for name in names}
    nodes = {client: node for record in records for client, node in record.get("nodes", {}).items()}
    times = [record["time"] for record in records if record.get("time")]
    return {"clients": last, "nodes": nodes, "first_round_began": times[:1], "last_round_began": times[-1:]}


class RunLog:
    """What happened in every round; with a folder, it is written there, and a run that is there is continued.

    A round is written when it ends: after its evaluations, by clients and by the server's own function.

    Args:
        folder: where it is written, if anywhere.
        metrics: what an evaluation measures, the primary one first; if none is known, the first evaluation tells.
        test_values: returns what a record has as test metrics, of what server and clients measured.
    """

    def __init__(self, folder: Path | None, metrics: Sequence[Metric], test_values: TestValues) -> None:
        self.folder, self.metrics, self.test_values = folder, tuple(metrics), test_values
        self.past: list[dict[str, Any]] = []  #: records of rounds before a restart
        self.records: list[RoundRecord] = []  #: of the rounds of this process
        self.refusals: list[Refusal] = []  #: every reply that did not count, with its node and the reason
        self.pending: list[Refusal] = []  #: those of evaluations and before round 1, for the next record
        self.best: BestModel | None = None  #: the model of the best round, if that one is kept
        self.ended = 0  #: how many of them have ended, evaluations included
        self.lost = 0  #: rounds that are run again although their private models had left the server
        self.clients_measured: Mapping[str, Any] = {}  #: what clients measured after the present round
        self.state: RunState | None = None  #: where the run stands
        self._run: RunFolder | None = None
        self._refused: AppendLog | None = None
        self._unwritten: list[Refusal] | None = None  # the refusals of a round that has not ended

    @property
    def continues(self) -> bool:
        """Whether the folder has a run that will be continued."""
        return self.folder is not None and is_run(self.folder)

    def fingerprint(self) -> dict[str, str]:
        """Return what the run in the folder was begun with; nothing if there is none."""
        found = read_json(self.folder / "environment.json") if self.folder is not None and self.continues else {}
        return dict(found.get("fingerprint", {}))

    def open(self, config: Config, state: RunState, about: dict[str, str], notes: Mapping[str, dict[str, Any]]) -> None:
        """Begin a run in the folder, or move ``state`` to the last checkpoint of the run that is there.

        ``about`` says what makes this experiment: with other values, a run that is there is refused.
        """
        self.past, self.records, self.refusals, self.state, self.ended = [], [], [], state, 0
        if self.folder is None:
            return
        if self.continues:
            self._run, self.past, ended = reopen(self.folder, config, state, about)
            tables = read_json(self.folder / "environment.json").get("metrics")
            if tables and not self.metrics:
                self.metrics = read_metrics(tables, {})
            if ended is None:
                log(INFO, "continuing %s after round %d", self.folder, state.round)
            else:
                log(
                    WARNING,
                    "%s has all %d rounds already: nothing is trained. Raise num_rounds, or choose another folder=",
                    *(self.folder, state.round),
                )
        else:
            self._run = RunFolder.create(self.folder)
            known = environment("flower", "cpu", fingerprint(about, config), self.metrics)
            self._run.note("environment", known)
            for name, note in notes.items():
                self._run.note(name, note)
            self._run.begin(config)
        assert self._run is not None  # this process is the only one
        self._refused = self._run.lines(REFUSALS)
        releases = read_json(self.folder / f"{RELEASES}.json")
        self.lost = int(releases.get("lost", 0)) + max(0, int(releases.get("last", 0)) - state.round)
        if self.lost:
            self.release(state.round)

    def add(self, record: RoundRecord, refused: list[Refusal]) -> None:
        """Add a round, whose evaluations are still to come."""
        self.records.append(record)
        self.refusals += refused
        self._unwritten, self.clients_measured = refused, {}

    def end_round(self, server: Mapping[str, Any] | None = None) -> None:
        """Complete the record of the present round with what was measured after it, and save the state.

        ``server`` is what the server measured with the user's function. If no round is open, it belongs to the model
        before round 1.
        """
        refused, self._unwritten = self._unwritten, None
        clients = {} if refused is None else self.clients_measured
        values = self.test_values(server or {}, clients)
        measured = {name: value for name, value in values.items() if not isinstance(value, list)}
        if measured and not self.metrics:
            self._know_metrics(measured)
        if refused is None:
            return
        record = self.records[-1]
        named_values = named("test", self.metrics or CLASSIFICATION, {}) | {f"test_{n}": v for n, v in measured.items()}
        own = {name: value for name, value in record.metrics.items() if value is not None or name not in named_values}
        facts = record.federation | {f"{EVALUATED}{name}": value for name, value in clients.items()}
        record = self.records[-1] = dataclasses.replace(record, metrics=named_values | own, federation=facts)
        if self.best is not None:
            self.best.see(json.loads(line(record)), record.diverged)
        self.ended = len(self.records)
        self._save(record, refused)

    def release(self, t: int) -> None:
        """Note that the private model of round ``t`` leaves the server before the round is written."""
        if self._run is not None:
            self._run.note(RELEASES, {"last": t, "lost": self.lost})

    def finish(self, config: Config, method: Method, whole_model: Callable[[Tensor], State]) -> None:
        """Write the summary and the model that is kept."""
        self.end_round()
        last, self.pending = self.pending, []
        self.refusals += last
        if last:
            self._save(None, last)
        if self._run is None:
            return
        state = self.state
        assert state is not None
        records = self.past + [json.loads(line(record)) for record in self.records]
        summary = summarize(config, records, "finished", None, self.metrics or CLASSIFICATION)
        summary |= summarize_federation(records)
        kept = method.evaluated(state.w, state.server)
        if self.best is not None and state.best is not None:
            kept, summary["model_round"] = state.best, self.best.round
        checkpoint.save_model(self._run.path / "model.safetensors", whole_model(kept))
        self._run.finish(summary)

    def close(self) -> None:
        """Write what was trained, even if its evaluation failed, and let go of the folder."""
        try:
            self.end_round()
        finally:
            if self._run is not None:
                self._run.close()
                self._run = self._refused = None

    def _know_metrics(self, measured: Mapping[str, Any]) -> None:
        """Note which metrics the run has, now that the first were measured."""
        self.metrics = guess_metrics(measured)
        if self._run is not None:
            about = read_json(self._run.path / "environment.json")
            self._run.note("environment", about | {"metrics": [metric.as_dict() for metric in self.metrics]})

    def _save(self, record: RoundRecord | None, refused: Sequence[Refusal]) -> None:
        """Write a round, its refused replies, and then a checkpoint with the lengths of the files.

        Without the checkpoint, the others do not count.
        """
        if self._run is None:
            return
        assert self._refused is not None
        assert self.state is not None
        if record is not None:
            self._run.append(record)
            self._run.records.sync()
        if refused:
            self._refused.append("".join(json.dumps(refusal.as_dict()) + "\n" for refusal in refused).encode())
            self._refused.sync()
        mark = self._run.records.mark
        checkpoint.save(self._run.checkpoint, self.state, mark, beside={REFUSALS: self._refused.mark})


class MetricValues:
    """Converts metrics, and warns once of each one that is no number.

    >>> MetricValues().convert({"loss": np.float32(0.5), "hits": [1, 2], "name": "a"})
    {'loss': 0.5, 'hits': [1, 2]}
    """

    def __init__(self) -> None:
        self._named: set[str] = set()

    def convert(self, values: Mapping[str, Any] | None) -> MetricRecord:
        """Return the metrics that are numbers or lists of numbers; nothing if there are none."""
        numbers = {name: _convert(value) for name, value in (values or {}).items()}
        for name in sorted({name for name, value in numbers.items() if value is None} - self._named):
            self._named.add(name)
            kind = type((values or {})[name]).__name__
            log(WARNING, "metric %r is no number but of type %s: it is left out of the records", name, kind)
        return MetricRecord({name: value for name, value in numbers.items() if value is not None})


def _convert(value: Any) -> int | float | list[int] | list[float] | None:
    """Return a number or a list of numbers, None for anything else."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray | Tensor) else value
    if not isinstance(value, list | tuple):
        return _number(value)
    numbers = [_number(each) for each in value]
    whole = [each for each in numbers if isinstance(each, int)]
    if len(whole) == len(numbers):
        return whole
    return None if None in numbers else [float(each) for each in numbers if each is not None]


def _number(value: Any) -> int | float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
