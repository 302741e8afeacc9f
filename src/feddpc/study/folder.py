"""The folder of a study: one run folder per run, and tables that are derived from them.

A sweep keeps its runs in ``items/KEY``, a comparison in ``METHOD-seedN``. ``failed/KEY.json`` says why a run failed,
``damaged/`` holds run folders that could not be used. Folders of two machines are merged by copying ``items``.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddpc.config import code_in
from feddpc.errors import FolderInUseError, RunFolderError
from feddpc.registry import code_digest
from feddpc.runs.record import RunFolder, is_blank, is_run, load_config, read_json, read_records
from feddpc.runs.stored import read_metrics
from feddpc.runs.summary import summarize
from feddpc.storage import explain_os_errors, replace_text, without_sync
from feddpc.study.spec import RunSpec, settings
from feddpc.tasks.metrics import ACCURACY, Metric

#: File with hashes of the user's own code that the runs use.
CODE = "code.json"
#: How the status of a run's summary is called in a study.
STATUS = {"finished": "done", "diverged": "diverged"}
#: Seconds to wait for another process that writes the plan or the tables of the same study.
PATIENCE = 30.0
#: The values of a result that are values of its metric; in tables their names go with its name: ``best_accuracy``.
VALUES = ("best", "last10", "final", "validation", "validated")
#: Columns of results.csv before those of the settings.
COLUMNS = (
    *("key", "label", "method", "seed", "status", "message", "rounds", "best", "best_round", "last10", "final"),
    *("validation", "validation_round", "validated", "seconds_per_round"),
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run and how it ended, with the values of its primary metric. None stands for unknown."""

    key: str
    spec: RunSpec
    status: str  #: done, diverged, missing (not run, or not to its end) or failed
    message: str = ""  #: why it failed or diverged, or how far it is
    damaged: bool = False  #: whether its folder holds something that cannot be used
    rounds: int = 0
    metric: Metric | None = None
    best: float | None = None  #: on the test set, of any round
    best_round: int | None = None
    last10: float | None = None
    final: float | None = None
    validation: float | None = None  #: best of any round on held-out training samples
    validation_round: int | None = None
    validated: float | None = None  #: on the test set in that round
    seconds_per_round: float | None = None
    path: Path

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to run."""
        return self.status in STATUS.values()

    def records(self) -> list[dict[str, Any]]:
        """Read the rounds."""
        return read_records(self.path / "rounds.jsonl")

    def score(self, by: str) -> float | None:
        """Return what settings are chosen by: the best value on held-out samples, or on the test set."""
        return self.validation if by == "validation" else self.best


def shared_metric(results: Iterable[RunResult]) -> Metric:
    """Return the metric of the first result that has one; results of one problem have the same."""
    return next((result.metric for result in results if result.metric), ACCURACY)


class StudyFolder:
    """The folder of a study."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.items, self.failed, self.damaged = (folder / name for name in ("items", "failed", "damaged"))

    def path(self, spec: RunSpec) -> Path:
        """Return the run folder of a run."""
        return self.items / spec.key

    def read(self, spec: RunSpec) -> RunResult:
        """Return how far a run is, from its folder."""
        try:
            return self._read(spec, self.path(spec))
        except RunFolderError as error:
            about: dict[str, Any] = {"status": "missing", "message": f"damaged: {error}", "damaged": True}
            return RunResult(key=spec.key, spec=spec, path=self.path(spec), **about)

    def _read(self, spec: RunSpec, path: Path) -> RunResult:
        failure = self._failure(spec)
        known: dict[str, Any] = {"key": spec.key, "spec": spec, "path": path}
        unfinished: dict[str, Any] = (
            {"status": "missing"} if failure is None else {"status": "failed", "message": failure}
        )
        if is_blank(path):
            return RunResult(**known, **unfinished)
        stored = load_config(path)
        if different := stored.differences(spec.decisive()):
            raise RunFolderError(f"it belongs to another configuration ({'; '.join(different)})")
        records, summary = read_records(path / "rounds.jsonl"), read_json(path / "summary.json")
        status = STATUS.get(str(summary.get("status")), "missing")
        if spec.extendable and status == "done" and summary.get("rounds") != stored.rounds:
            status = "missing"  # it is being continued for more rounds
        if status != "missing" and summary.get("rounds") != len(records):
            raise RunFolderError(f"{len(records)} rounds are recorded, but the summary has {summary.get('rounds')}")
        if status == "done" and len(records) != stored.rounds:
            raise RunFolderError(f"{len(records)} of {stored.rounds} rounds recorded, but the summary says finished")
        if spec.extendable:
            records, status = _until(spec.config.rounds, records, status)
        try:
            about = {} if "primary" in summary else read_json(path / "environment.json", [])
            metrics = read_metrics(about.get("metrics"), summary)
            facts = summarize(stored, records, status, None, metrics)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path / 'rounds.jsonl'}: a round lacks or garbles {error}") from None
        known |= {key: facts[key] for key in ("rounds", "best_round", "seconds_per_round")}
        known |= {name: facts.get(f"{name}_{metrics[0].name}") for name in VALUES}
        known |= {"validation_round": facts.get("validation_round"), "metric": metrics[0]}
        if status == "missing":
            return RunResult(**known, **{"message": f"{len(records)} of {spec.config.rounds} rounds"} | unfinished)
        return RunResult(**known, status=status, message=str(summary.get("reason") or ""))

    def rounds(self, spec: RunSpec) -> int:
        """Return how many rounds of a run are recorded."""
        try:
            return (self.path(spec) / "rounds.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _failure(self, spec: RunSpec) -> str | None:
        note = read_json(self.failed / f"{spec.key}.json", [])
        return str(note.get("message", "")) if note else None

    def fail(self, spec: RunSpec, message: str, trace: str = "") -> None:
        """Record why a run failed."""
        note = {"message": message, "label": spec.name, "config": spec.config.asdict(), "trace": trace}
        with explain_os_errors(self.failed):
            self.failed.mkdir(parents=True, exist_ok=True)
        replace_text(self.failed / f"{spec.key}.json", json.dumps(note, indent=1) + "\n")

    def clear_failure(self, spec: RunSpec) -> None:
        """Forget that a run failed: it is tried again."""
        with explain_os_errors(self.failed):
            (self.failed / f"{spec.key}.json").unlink(missing_ok=True)

    def drop_checkpoint(self, spec: RunSpec) -> None:
        """Remove the checkpoint of an extendable run that will hardly be continued; its records stay.

        A run that has more rounds than ``spec`` asks for was continued after all, and keeps it.
        """
        with suppress(FolderInUseError, RunFolderError):
            lock = RunFolder.reopen(self.path(spec))
            if self.rounds(spec) <= spec.config.rounds:
                shutil.rmtree(self.path(spec) / "checkpoint", ignore_errors=True)
            lock.close()

    def begin_again(self, spec: RunSpec) -> None:
        """Remove an extendable run that has no checkpoint to continue from."""
        path = self.path(spec)
        if spec.extendable and is_run(path) and not (path / "checkpoint").exists():
            lock = RunFolder.reopen(path)  # raises if another process has it
            shutil.rmtree(path)
            lock.close()

    def set_aside(self, spec: RunSpec, *, only_damaged: bool) -> None:
        """Move a run folder that cannot be used to ``damaged``, unless another process has repaired or finished it."""
        path = self.path(spec)
        lock = RunFolder.reopen(path)
        try:
            result = self.read(spec)
            if result.ended or (only_damaged and not result.damaged):
                return
            with explain_os_errors(self.damaged):
                self.damaged.mkdir(exist_ok=True)
                target = next(p for n in range(1, 10_000) if not (p := self.damaged / f"{spec.key}-{n}").exists())
                path.rename(target)
                if is_run(target):
                    (target / "config.toml").rename(target / "config.damaged.toml")  # so that no report counts it
        finally:
            lock.close()

    def note_code(self, specs: Iterable[RunSpec], remedy: str) -> None:
        """Note the content of the user's own files, and warn of those that changed since earlier runs."""
        names = {name for spec in specs for name in code_in(spec.config.asdict())}
        if not names:
            return
        now = {name.partition(":")[0]: code_digest(name) for name in sorted(names)}
        with locked(self.folder):
            before = read_json(self.folder / CODE, [])
            replace_text(self.folder / CODE, json.dumps(before | now, indent=1) + "\n")
        if changed := [file for file, digest in now.items() if before.get(file, digest) != digest]:
            warnings.warn(f"{', '.join(changed)} changed since earlier runs: {remedy}", stacklevel=2)

    def stored_specs(self) -> list[RunSpec]:
        """Return one spec per run folder below ``items``, by method, setting and seed."""
        paths = self.items.iterdir() if self.items.is_dir() else ()
        specs = [_stored_spec(path) for path in paths if is_run(path)]
        return sorted(specs, key=lambda s: (s.config.method, json.dumps(settings(s.config)), s.config.seed))

    def write_results(self, results: Sequence[RunResult], choices: Sequence[dict[str, Any]] = ()) -> None:
        """Write results.jsonl and results.csv in the order of ``results``, and chosen.json if anything was chosen."""
        usual = shared_metric(results)
        rows = [self._row(result, result.metric or usual) for result in results]
        with locked(self.folder), without_sync():  # these files can be derived again
            replace_text(self.folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            replace_text(self.folder / "results.csv", _csv(rows))
            order = {"runs": list(dict.fromkeys(row["key"] for row in rows))}  # of the table that `feddpc report` makes
            replace_text(self.folder / "order.json", json.dumps(order, indent=1) + "\n")
            if choices:
                replace_text(self.folder / "chosen.json", json.dumps(choices, indent=1) + "\n")

    def _row(self, result: RunResult, metric: Metric) -> dict[str, Any]:
        config = result.spec.config
        own = {"label": result.spec.name, "method": config.method, "seed": config.seed}
        plain = {name: own.get(name, getattr(result, name, None)) for name in COLUMNS}
        plain = {f"{name}_{metric.name}" if name in VALUES else name: value for name, value in plain.items()}
        path = result.path.relative_to(self.folder) if result.path.is_relative_to(self.folder) else result.path
        return {**plain, "path": str(path), "tags": dict(result.spec.tags), "settings": settings(config)}


def _stored_spec(path: Path) -> RunSpec:
    """Return the spec of a run folder; the key, its name, says whether the run is extendable."""
    spec = RunSpec(load_config(path))
    extendable = dataclasses.replace(spec, extendable=True)
    return extendable if extendable.key == path.name else spec


def _until(rounds: int, records: list[dict[str, Any]], status: str) -> tuple[list[dict[str, Any]], str]:
    """Return the first ``rounds`` records of a run that may have fewer or more, and how it stands there."""
    if len(records) > rounds or (len(records) == rounds and status == "missing"):
        return records[:rounds], "done"
    return records, "missing" if status == "done" and len(records) < rounds else status


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows for a spreadsheet: one column per setting that is not the same in all rows."""
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("path", "tags", "settings"))
    names = dict.fromkeys(name for row in rows for name in row["settings"])
    varied = [n for n in names if len({json.dumps(row["settings"].get(n)) for row in rows}) > 1]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *varied])
    for row in rows:
        writer.writerow([*(row.get(name) for name in columns), *(row["settings"].get(name) for name in varied)])
    return text.getvalue()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study folder for a moment; wait for another process that has it."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            lock = RunFolder.reopen(folder)
            break
        except FolderInUseError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.close()
