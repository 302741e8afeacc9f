"""Running the runs of a study that are not there yet, with workers that may die, next to other processes."""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from feddpc.ranks import refuse_ranks
from feddpc.runs.runner import CHECKPOINT_SECONDS
from feddpc.runs.stop import Stop
from feddpc.storage import explain_os_errors, make_folder, replace_text, without_sync
from feddpc.study import setup_cache
from feddpc.study.folder import RunResult, StudyFolder, locked
from feddpc.study.spec import RunSpec
from feddpc.study.workers import STUDY_ID, InProcess, RunBatch, RunReport, WorkerPool, Workers
from feddpc.torch_globals import preserve_torch_globals

#: How often a worker may die during a run before the run counts as failed.
MAX_DEATHS = 3
#: Seconds between two looks at runs that other processes have, and between two reports of progress.
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    total: int
    ended: int  #: done or diverged
    failed: int
    running: int
    rounds: int  #: recorded so far, in all runs
    all_rounds: int  #: to be recorded in total


OnProgress = Callable[[Progress], None]


@preserve_torch_globals()
def run_study(
    specs: Sequence[RunSpec],
    folder: Path,
    *,
    workers: Workers | None = None,
    on_progress: OnProgress | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[RunResult]:
    """Run what is not there yet and return the results of all runs, in the order of ``specs``.

    A finished run is not run again, an unfinished one continues from its checkpoint, and a failed one is tried again.
    Other processes may work on the same folder, on this machine or another: each run is made by the process that
    holds the lock of its folder, and each call returns when all its runs are there. A request to ``stop`` is obeyed
    after the present round.
    """
    refuse_ranks("a study")
    study = _StudyExecution(specs, folder, on_progress, stop or Stop())
    study.run(workers or InProcess(), checkpoint_seconds)
    results = {key: study.result(key) for key in study.specs}
    study.folder.write_results(list(results.values()))
    return [dataclasses.replace(results[spec.key], spec=spec) for spec in specs]


class _StudyExecution:
    """One call of :func:`run_study`."""

    def __init__(self, specs: Sequence[RunSpec], folder: Path, on_progress: OnProgress | None, stop: Stop) -> None:
        self.folder, self.stop, self.on_progress = StudyFolder(folder), stop, on_progress
        self.specs = {spec.key: spec for spec in specs}
        with without_sync():
            make_folder(folder)
            self.folder.note_code(specs, "the runs that use it are made again")
        self.results = {key: self.folder.read(spec) for key, spec in self.specs.items()}
        self.queue: list[tuple[float, RunBatch]] = []  #: batches, and when each may be sent to a worker
        self.sent: list[RunBatch] = []  #: batches that are with a worker
        self.out: dict[Future[list[RunReport]], RunBatch] = {}
        self.deaths: Counter[str] = Counter()
        self.reported = 0.0

    def run(self, workers: Workers, checkpoint_seconds: float) -> None:
        """Work until no run is left, or a stop is requested."""
        specs = [spec for key, spec in self.specs.items() if not self.results[key].ended]
        if not specs:
            return
        for spec in specs:
            self.folder.clear_failure(spec)
        folder = self.folder.folder
        study_id = _study_id(folder) if workers.remote else ""
        for group in _by_setup(specs, workers.batch_size):
            batch = RunBatch(
                tuple(group), folder.resolve(), checkpoint_seconds, workers.at_once, workers.ranks, study_id
            )
            self.queue.append((0.0, batch))
        with workers.open(self.stop, self._report) as pool:
            stopping = False
            while self.out or (self.queue and not stopping):
                if self.stop.wanted and not stopping:
                    stopping = True
                    pool.stop()
                while not stopping and len(self.out) < pool.size and (batch_due := self._next_batch()):
                    self.sent.append(batch_due)  # first: a worker in this process is done when submit returns
                    self.out[pool.submit(batch_due)] = batch_due
                self._report()
                if self.out:
                    for future in wait(self.out, POLL_SECONDS, FIRST_COMPLETED).done:
                        self._receive(future, pool)
                elif self.queue and not stopping:
                    time.sleep(POLL_SECONDS)  # other processes have the rest

    def result(self, key: str) -> RunResult:
        """Return the result of a run, read again unless the run had ended."""
        if not self.results[key].ended:
            self.results[key] = self.folder.read(self.specs[key])
        return self.results[key]

    def _next_batch(self) -> RunBatch | None:
        """Take a batch that may be sent now from the queue."""
        now = time.monotonic()
        due = next((entry for entry in self.queue if entry[0] <= now), None)
        if due is None:
            return None
        self.queue.remove(due)
        return due[1]

    def _receive(self, future: Future[list[RunReport]], pool: WorkerPool) -> None:
        """Record how the runs of a batch went; those that are not done are queued again."""
        batch = self.out.pop(future)
        self.sent.remove(batch)
        try:
            states = {report.key: self._record(report) for report in future.result()}
        except pool.deaths as error:
            states = {spec.key: self._record_death(spec, error) for spec in batch.specs}
        again = tuple(spec for spec in batch.specs if states[spec.key] not in ("ended", "failed"))
        if again:
            later = time.monotonic() + POLL_SECONDS if "busy" in states.values() else 0.0
            self.queue.append((later, dataclasses.replace(batch, specs=again)))
        self._report(now=True)

    def _record_death(self, spec: RunSpec, error: BaseException) -> str:
        """Count that the worker of a run died; return ``failed`` if that was too often."""
        if not self.stop.wanted:
            self.deaths[spec.key] += 1
        if self.deaths[spec.key] < MAX_DEATHS:
            return "interrupted"
        cause = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return self._record(RunReport(spec.key, "failed", f"its worker died {MAX_DEATHS} times, last: {cause}"))

    def _record(self, report: RunReport) -> str:
        """Store what a worker reports about a run, and return the run's state."""
        if report.files:
            self._store_files(report)
        if report.state == "failed":
            self.folder.fail(self.specs[report.key], report.message, report.trace)
        self.result(report.key)
        return report.state

    def _store_files(self, report: RunReport) -> None:
        """Put a run folder in place that came from a machine without access to this folder."""
        path = self.folder.path(self.specs[report.key])
        part = path.with_name(f".{report.key}.part")
        with explain_os_errors(path):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for name, content in report.files.items():
                (part / name).write_bytes(content)
            shutil.rmtree(path, ignore_errors=True)  # an unfinished attempt
            part.rename(path)

    def _report(self, *, now: bool = False) -> None:
        """Report progress, every POLL_SECONDS at most."""
        if self.on_progress is None or (not now and time.monotonic() - self.reported < POLL_SECONDS):
            return
        self.reported = time.monotonic()
        sent = [spec for batch in self.sent for spec in batch.specs]
        for spec in sent:  # some runs of a batch that is out may have ended
            if (self.folder.path(spec) / "summary.json").is_file():
                self.result(spec.key)
        ended = [result for result in self.results.values() if result.ended]
        running = [spec for spec in sent if not self.results[spec.key].ended and self.folder.path(spec).is_dir()]
        failed = sum(result.status == "failed" for result in self.results.values())
        rounds = sum(result.rounds for result in ended) + sum(map(self.folder.rounds, running))
        all_rounds = sum(spec.config.rounds for spec in self.specs.values())
        self.on_progress(Progress(len(self.specs), len(ended), failed, len(running), rounds, all_rounds))


def _by_setup(specs: Sequence[RunSpec], size: int | None) -> list[list[RunSpec]]:
    """Group runs that share data, partition and model, so that these are built once; at most ``size`` per group."""
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault(setup_cache.setup_key(spec.complete), []).append(spec)
    parts = [(group, size or len(group)) for group in groups.values()]
    return [group[i : i + most] for group, most in parts for i in range(0, len(group), most)]


def _study_id(folder: Path) -> str:
    """Return the id of a study's folder, by which other machines recognize it."""
    with locked(folder):
        if not (folder / STUDY_ID).exists():
            replace_text(folder / STUDY_ID, uuid.uuid4().hex)
        return (folder / STUDY_ID).read_text(encoding="utf-8")
