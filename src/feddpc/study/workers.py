"""Workers that execute the runs of a study: this process, or several processes of this machine.

``ray_workers`` adds other machines.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_bool
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from feddpc.checks import check_int
from feddpc.errors import BadInputError, FeddpcError, FolderInUseError, RunFolderError
from feddpc.experiment import Experiment
from feddpc.runs.concurrent import clone_for_thread, run_concurrently
from feddpc.runs.record import RunFolder, is_run
from feddpc.runs.runner import CHECKPOINT_SECONDS, Outcome, execute
from feddpc.runs.stop import Stop
from feddpc.storage import without_sync
from feddpc.study import setup_cache
from feddpc.study.folder import StudyFolder
from feddpc.study.rank_runs import execute_on_ranks
from feddpc.study.spec import RunSpec

#: Files of a run that a machine without access to the study's folder sends back.
SENT_FILES = ("environment.json", "config.toml", "privacy.json", "rounds.jsonl", "summary.json")
#: File by which a worker recognizes the study's folder.
STUDY_ID = ".study-id"
OnRound = Callable[[dict[str, Any]], None]
Tick = Callable[[], None]
#: Runs at once are prepared one at a time, because they share the setup cache.
_PREPARING = threading.Lock()


@dataclass(frozen=True)
class RunBatch:
    """Runs for one worker, all with the same setup."""

    specs: tuple[RunSpec, ...]
    folder: Path
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    at_once: int = 1  #: how many of them run at a time
    ranks: int = 1  #: how many processes share each run
    study_id: str = ""  #: what STUDY_ID holds; empty if every worker has access to the folder
    working_folder: Path = field(default_factory=Path.cwd)  #: what relative paths are relative to


class RunReport(NamedTuple):
    """What a worker says about a run: ended, interrupted, busy (another process has it) or failed."""

    key: str
    state: str
    message: str = ""
    trace: str = ""
    files: dict[str, bytes] = {}  # noqa: RUF012 -- the run folder, where the worker has no access to the study's


def execute_spec(spec: RunSpec, path: Path, **how: Any) -> Outcome:
    """Run one spec in the folder ``path``, with the setup that earlier runs of this process have built.

    The run keeps its records only, an extendable one its checkpoint too, and is not forced to the disk: what a power
    cut damages is run again.
    """
    how |= {"lean": True, "extendable": spec.extendable}
    with without_sync():
        return execute_shared(partial(setup_cache.experiment, spec.complete), out=path, resume=True, **how)


def execute_shared(setup: Callable[[], Experiment], *, at_once: int = 1, **how: Any) -> Outcome:
    """Run the experiment that ``setup`` returns; of several at once, each has a network of its own."""
    with _PREPARING:
        shared = setup()
        experiment = shared if at_once == 1 else clone_for_thread(shared)
    return execute(experiment, **how)


def run_batch(batch: RunBatch, *, on_round: OnRound | None = None, stop: Stop | None = None) -> list[RunReport]:
    """Run the specs of a batch in this process, as many at once as it says, and report on each."""
    stop, lock = stop or Stop(), threading.Lock()
    visible = not batch.study_id or _study_id(batch.folder) == batch.study_id
    folder = StudyFolder(batch.folder if visible else _scratch())

    def report(record: dict[str, Any]) -> None:
        with lock:
            if on_round is not None:
                on_round(record)

    def run(spec: RunSpec) -> RunReport:
        if stop.wanted:
            return RunReport(spec.key, "interrupted")
        done = _attempt(spec, folder, batch, report, stop)
        return done if visible else _packed(done, folder.path(spec))

    return run_concurrently([partial(run, spec) for spec in batch.specs], min(batch.at_once, len(batch.specs)))


def _attempt(spec: RunSpec, folder: StudyFolder, batch: RunBatch, on_round: OnRound, stop: Stop) -> RunReport:
    """Run one spec; an error is reported and does not stop the others."""
    advanced, path = False, folder.path(spec)

    def count(record: dict[str, Any]) -> None:
        nonlocal advanced
        advanced = True
        on_round(record)

    how: dict[str, Any] = {"stop": stop, "checkpoint_seconds": batch.checkpoint_seconds}

    def run() -> str:
        if batch.ranks > 1:
            return execute_on_ranks(spec, path, batch.ranks, **how)
        return execute_spec(spec, path, at_once=len(batch.specs), on_round=count, **how).status

    try:
        if path.exists():
            RunFolder.reopen(path).close()  # raises if another process is running it
        result = folder.read(spec)
        if result.ended:
            return RunReport(spec.key, "ended")
        if result.damaged:
            folder.set_aside(spec, only_damaged=True)
        folder.begin_again(spec)
        try:
            status = run()
        except FolderInUseError:
            raise
        except RunFolderError:
            if advanced or not is_run(path):
                raise
            folder.set_aside(spec, only_damaged=False)  # it cannot be continued, unless another process finished it
            if folder.read(spec).ended:
                return RunReport(spec.key, "ended")
            status = run()
        return RunReport(spec.key, "interrupted" if status == "interrupted" else "ended")
    except FolderInUseError:
        return RunReport(spec.key, "busy")
    except FeddpcError as error:
        return RunReport(spec.key, "failed", str(error))
    except Exception as error:
        return RunReport(spec.key, "failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def _packed(report: RunReport, folder: Path) -> RunReport:
    """Return the report on a run with its files, and remove them here."""
    if report.state != "ended":
        return report
    files = {name: (folder / name).read_bytes() for name in SENT_FILES}
    shutil.rmtree(folder, ignore_errors=True)
    return report._replace(files=files)


def _study_id(folder: Path) -> str | None:
    try:
        return (folder / STUDY_ID).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


@cache
def _scratch() -> Path:
    """Return a folder of this process for runs of a study whose folder it has no access to."""
    folder = Path(tempfile.mkdtemp(prefix="feddpc-study-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class WorkerPool(ABC):
    """Workers that are ready for batches; at the end of the ``with`` block they are gone."""

    size: int  #: how many batches may be out at a time
    #: Errors of a batch that mean that its worker died; another one continues its runs.
    deaths: tuple[type[BaseException], ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:  # noqa: B027
        """End all workers."""

    @abstractmethod
    def submit(self, batch: RunBatch) -> Future[list[RunReport]]:
        """Give a batch to a worker that is free."""

    def stop(self) -> None:  # noqa: B027
        """Ask all workers to stop after their present round."""


@dataclass(frozen=True)
class Workers(ABC):
    """A kind of workers; each runs ``at_once`` runs with the same setup at a time, or one on several ``ranks``."""

    at_once: int = field(default=1, kw_only=True)
    ranks: int = field(default=1, kw_only=True)
    remote = False  #: whether workers may have no access to the study's folder

    def __post_init__(self) -> None:
        check_int("at_once", self.at_once, 1)
        check_int("ranks", self.ranks, 1)
        if self.ranks > 1 and self.at_once > 1:
            raise BadInputError(f"ranks = {self.ranks} and at_once = {self.at_once}: a run on several ranks is alone")

    @property
    def batch_size(self) -> int | None:
        """How many runs a worker gets at a time, all of which are repeated if it dies; None for no limit."""
        return self.at_once

    @abstractmethod
    def open(self, stop: Stop, tick: Tick) -> WorkerPool:
        """Start the workers; ``stop`` asks this process to stop, ``tick`` is called after a round in this process."""


@dataclass(frozen=True)
class InProcess(Workers):
    """This process, one batch after the other."""

    @property
    def batch_size(self) -> int | None:
        """All runs with the same setup: as one ends, the next begins."""
        return None if self.at_once > 1 else 1

    def open(self, stop: Stop, tick: Tick) -> WorkerPool:
        """Return a pool that runs a batch when it is submitted."""
        return _InProcessPool(stop, tick)


class _InProcessPool(WorkerPool):
    size = 1

    def __init__(self, stop: Stop, tick: Tick) -> None:
        self.stop_request, self.tick = stop, tick  # the runs see the request themselves

    def submit(self, batch: RunBatch) -> Future[list[RunReport]]:
        done: Future[list[RunReport]] = Future()
        done.set_result(run_batch(batch, on_round=lambda _: self.tick(), stop=self.stop_request))
        return done


@dataclass(frozen=True)
class Processes(Workers):
    """Several processes of this machine with one thread each."""

    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("processes", self.count, 1)

    def open(self, stop: Stop, tick: Tick) -> WorkerPool:
        """Return a pool that starts processes as it needs them."""
        return _ProcessPool(self.count)


class _ProcessPool(WorkerPool):
    """One executor with one process per slot, so that a process that dies does not take the others with it."""

    deaths = (BrokenProcessPool,)

    def __init__(self, size: int) -> None:
        self.size = size
        # Not forked: a process that has used threads or a GPU cannot be copied.
        self.context = multiprocessing.get_context("spawn")
        self.stopping = self.context.RawValue(c_bool, False)
        self.slots: dict[ProcessPoolExecutor, Future[list[RunReport]]] = {}

    def submit(self, batch: RunBatch) -> Future[list[RunReport]]:
        for slot in [slot for slot, last in self.slots.items() if last.done()]:
            try:
                self.slots[slot] = slot.submit(_run_in_process, batch)
                return self.slots[slot]
            except BrokenProcessPool:
                del self.slots[slot]
        slot = ProcessPoolExecutor(1, self.context, _start_process, (self.stopping,))
        self.slots[slot] = slot.submit(_run_in_process, batch)
        return self.slots[slot]

    def stop(self) -> None:
        self.stopping.value = True

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            self.stop()
        for slot in self.slots:
            slot.shutdown(cancel_futures=True)


#: In a worker process: whether the study wants to stop.
_stopping: Any = None


def _start_process(stopping: Any) -> None:
    """Prepare a worker process: it has one thread, ignores Ctrl-C (the study handles it), and ends with its parent."""
    import torch

    global _stopping
    _stopping = stopping
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_process(batch: RunBatch) -> list[RunReport]:
    stop = Stop()

    def watch(_: object) -> None:
        stop.wanted = bool(_stopping.value)

    watch(None)
    return run_batch(batch, on_round=watch, stop=stop)
