"""Running one experiment, from round 1 or from its last checkpoint, with records and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from feddpc import methods
from feddpc.build import for_method, resolve_device
from feddpc.callbacks import Callback, Callbacks, Run
from feddpc.config import EXECUTION_KEYS, MAY_CHANGE, OPTIONS_BY_CHOICE, Config, code_in
from feddpc.errors import RunFolderError
from feddpc.experiment import Experiment
from feddpc.methods.base import Method, State
from feddpc.own_functions import describe
from feddpc.registry import code_digest, short_name
from feddpc.round.placement import Placement, resolve
from feddpc.round.round import RoundRecord, run_round
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import LogMark
from feddpc.runs.engine_choice import CHOSEN, Compile, choose_engine
from feddpc.runs.record import (
    LEARNED,
    RunFolder,
    config_digest,
    environment,
    is_run,
    line,
    load_config,
    read_json,
    read_records,
    summarize,
    without_former_last,
)
from feddpc.runs.tracking import Track, Tracking
from feddpc.tasks.metrics import Metric
from feddpc.torch_globals import set_precision

OnRound = Callable[[dict[str, Any]], None]

#: How runs end that have nothing left to compute.
ENDED = ("finished", "diverged")
#: Seconds between checkpoints, unless asked otherwise.
CHECKPOINT_SECONDS = 5.0


class Stop:
    """A request to stop after the current round."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C (or SIGTERM) of our program into a request to stop; the second interrupts at once."""
        with self._handling(signal.SIGINT, signal.SIGTERM):
            yield

    @contextmanager
    def on_callers_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C in a user's program into a request to stop, and say so; the second interrupts at once.

        SIGTERM is the caller's, and so is Ctrl-C if the caller has a handler for it.
        """
        own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with nullcontext() if own else self._handling(signal.SIGINT, tell=True):
            yield

    @contextmanager
    def _handling(self, *numbers: signal.Signals, tell: bool = False) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(_number: int, _frame: FrameType | None) -> None:
            if self.wanted:
                raise KeyboardInterrupt
            self.wanted = True
            if tell:
                with suppress(RuntimeError, OSError):  # the signal may have come in the middle of another print
                    print("stopping after this round; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)

        before = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Listener(Protocol):
    """Follows the progress of runs, one after the other."""

    def begin(self, config: Config) -> None:
        """A run starts or continues."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""

    def end(self, summary: dict[str, Any]) -> None:
        """A run has ended."""

    def another(self) -> Listener:
        """Return a listener for another run at the same time."""


@dataclass(frozen=True)
class Outcome:
    """A run that ended: how, what it recorded, and the model that it keeps."""

    config: Config
    status: str  #: finished, diverged, interrupted (by Ctrl-C) or stopped (by a callback)
    reason: str | None
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    w: Tensor
    folder: Path | None
    experiment: Experiment  #: what it ran on
    clients: dict[str, list[float]] = field(default_factory=dict)  #: metrics at each client, at the end


def execute(
    experiment: Experiment,
    *,
    method: Method | None = None,
    engine: str | None = None,
    compile: Compile | None = None,
    out: Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    lean: bool = False,
    track: Track = (),
    examine: Callable[[Experiment], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run ``experiment.config`` to its last round and return what came out.

    With ``out`` everything is recorded in that folder as it happens, with a checkpoint every ``checkpoint_seconds``;
    with ``resume`` a run that is there is continued. ``engine`` and ``compile`` replace what the configuration says.
    A ``lean`` run is one of many: when it has ended it leaves its records, but neither its model nor a checkpoint.
    ``track`` names who else is told of the rounds; a resumed run goes on with those it had. ``examine`` sees what the
    method made of the experiment, and may raise, before anything is written. ``callbacks`` may stop the run; if one of
    them raises an error, the round is kept and the run can be resumed.
    """
    stop = stop or Stop()
    tracking = Tracking.of(track, out, resume)
    asked = experiment.config
    name = asked.method if method is None else method.name
    method = method or methods.create(asked.method, **asked.hyper)
    set_precision(asked.precision)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    resume = resume and out is not None and is_run(out)
    stored = load_config(out) if resume and out is not None else None
    experiment = for_method(experiment, method, _learned(out) if resume and out is not None else None)
    if examine is not None:
        examine(experiment)
    memory = asked.client_memory
    if stored is not None:  # a resumed run keeps its engine and its place for memories
        if asked.engine in CHOSEN:
            engine, compile = engine or stored.engine, stored.compile
        memory = stored.client_memory if memory == "auto" else memory
    machine, timings = choose_engine(engine or asked.engine, experiment, method, compile=compile)
    kind = resolve(memory, method, experiment.w0, len(experiment.population))
    config = dataclasses.replace(
        asked,
        method=name,
        hyper=method.hyper(),
        device=resolve_device(asked.device),
        threads=experiment.threads,
        engine=machine.name,
        compile=getattr(machine, "compile", False),
        client_memory=kind,
        data_memory="device" if experiment.task.host is None else "host",
    )
    placement = Placement(kind, out / "checkpoint" if out is not None else None)
    progress = RunState.of(experiment, method, placement)
    folder: RunFolder | None = None
    records: list[dict[str, Any]] = []
    ended: tuple[str, str | None] | None = None
    if out is not None and resume:
        folder, records, ended = reopen(out, config, progress, experiment.fingerprint() | _code(method, config))
    elif out is not None:
        world = fingerprint(experiment.fingerprint() | _code(method, config), config)
        about = environment(machine.name, timings, config.device, world, experiment.task.metrics)
        folder = _begin(out, config, experiment, method, about, lean)
    keeper = _Keeper(folder, progress, checkpoint_seconds, lean)
    watching = Callbacks(callbacks, Run(config, experiment, method, progress, records, out))
    summary: dict[str, Any] | None = None
    clients = _stored_clients(out, progress.round) if resume and out is not None else {}
    try:
        best = None
        if config.keep == "best":
            past = records[:-1] if ended is not None and ended[0] == "diverged" else records
            part = "test" if experiment.validate is None else "validation"
            best = BestModel(experiment.task.metrics[0], part, method, progress, past)
        if out is not None:
            tracking.begin(config, out, records)
        if listener is not None:
            listener.begin(config)
        watching.call("on_run_begin")
        while ended is None:
            record = run_round(experiment, method, machine, progress)
            records.append(json.loads(line(record)))
            if best is not None:
                best.see(records[-1], record.diverged)
            if record.clients:
                clients = record.clients
                if folder is not None:
                    folder.note("clients", {"round": record.round, "metrics": clients}, indent=None)
            try:
                watching.call("on_round_end")
            except Exception:
                keeper.keep(record, _why(record, config, stop) or ("interrupted", None))
                raise
            ended = _why(record, config, stop) or watching.run.stopped
            keeper.keep(record, ended)
            tracking.round(records[-1])
            if listener is not None:
                listener.round(records[-1])
            if on_round is not None:
                on_round(records[-1])
        status, reason = ended
        summary = summarize(config, records, status, reason, experiment.task.metrics)
        summary["costs"] = progress.meter.summary()
        kept = progress.model(method)
        if best is not None and progress.best is not None:
            kept, summary["model_round"] = progress.best, best.round
        if folder is not None:
            if not lean:
                checkpoint.save_model(folder.path / "model.safetensors", experiment.task.flat.state_dict(kept))
            folder.finish(summary)
            if lean and status in ENDED:
                shutil.rmtree(folder.checkpoint, ignore_errors=True)
        watching.run.status = status
        watching.call("on_run_end")
        if listener is not None:
            listener.end(summary)
    finally:
        tracking.end(summary)
        if folder is not None:
            folder.close()
        with suppress(RuntimeError) if summary is None else nullcontext():  # a device that failed fails here again
            machine.release()
    return Outcome(config, status, reason, records, summary, kept, out, experiment, clients)


def _begin(
    out: Path, config: Config, experiment: Experiment, method: Method, about: dict[str, Any], lean: bool
) -> RunFolder:
    """Make the folder of a run; its configuration comes last, so that a run that can be resumed lacks nothing."""
    folder = RunFolder.create(out)
    try:
        folder.note("environment", about)
        folder.note("privacy", experiment.privacy_note(method))
        if not lean:
            folder.note("holdings", experiment.holdings(), indent=None)
        if experiment.learned:
            checkpoint.save_model(out / LEARNED, experiment.learned)
        folder.begin(config)
    except BaseException:
        folder.close()
        raise
    return folder


def _stored_clients(out: Path, last: int) -> dict[str, list[float]]:
    """Return the metrics at each client that a run folder has of round ``last``."""
    path = out / "clients.json"
    stored = read_json(path) if path.exists() else {}
    return dict(stored["metrics"]) if stored.get("round") == last else {}


def _code(method: Method, config: Config) -> dict[str, str]:
    """Return a digest of each piece of the user's own code: a changed one makes another run."""
    own = {f"code of {short_name(name)}": code_digest(name) for name in code_in(config.asdict())}
    if type(method).__module__.startswith("feddpc."):
        return own
    return own | {f"code of {method.name}": describe(type(method))}


def fingerprint(world: dict[str, str], config: Config) -> dict[str, str]:
    """Return what tells whether a run is resumed with the settings, data and code that it started with."""
    return world | {"configuration": config_digest(config)}


def _learned(out: Path) -> State | None:
    """Return what the method had found out before round 1, if it got so far."""
    return checkpoint.load_model(out / LEARNED) if (out / LEARNED).exists() else None


class _Keeper:
    """Writes every round down, and a checkpoint now and then; without a folder it does nothing."""

    def __init__(self, folder: RunFolder | None, progress: RunState, seconds: float, lean: bool) -> None:
        self.folder, self.progress, self.seconds, self.lean = folder, progress, seconds, lean
        self.due = time.monotonic() + seconds

    def keep(self, record: RoundRecord, ended: tuple[str, str | None] | None) -> None:
        """Record a round, and how the run ended if it was the last."""
        if self.folder is None:
            return
        self.folder.append(record)
        began = time.monotonic()
        if ended is None and began < self.due:
            return
        if ended is not None and self.lean and ended[0] in ENDED:
            return  # the checkpoints are about to go
        self.folder.records.sync()  # they must be on the disk before a checkpoint says so
        checkpoint.save(self.folder.checkpoint, self.progress, self.folder.records.mark, record.diverged)
        # A slow checkpoint (a large memory of clients) must not take more than a twentieth of the time.
        took, share = time.monotonic() - began, 100 if self.lean else 20
        self.due = time.monotonic() + max(self.seconds, share * took if self.seconds else 0.0)


class BestModel:
    """Keeps the model of the round with the best value of ``metric`` on ``part``, test or validation data.

    ``past`` are the records of earlier rounds, and ``progress`` has their best model.
    """

    def __init__(
        self, metric: Metric, part: str, method: Method, progress: RunState, past: Sequence[dict[str, Any]]
    ) -> None:
        self.method, self.progress = method, progress
        self.metric, self.key = metric, metric.key(part)
        scored = [record for record in past if record[self.key] is not None]
        self.record = self.metric.pick(scored, lambda record: record[self.key])
        if self.record is not None and progress.best is None:
            raise RunFolderError(
                f"the checkpoint of round {progress.round} lacks the model of round {self.round}, which the run keeps "
                '(keep = "best"): restore the checkpoint, or start a new run'
            )

    @property
    def round(self) -> int | None:
        """The best round so far; None while no round was evaluated."""
        return None if self.record is None else int(self.record["round"])

    def see(self, record: dict[str, Any], diverged: str | None) -> None:
        """Keep the present model if its round is the best one; a round that was not evaluated does not count."""
        value = record[self.key]
        if diverged or value is None:
            return
        if self.record is None or self.metric.sign * value > self.metric.sign * self.record[self.key]:
            self.record, self.progress.best = record, self.progress.model(self.method).clone()


def _why(record: RoundRecord, config: Config, stop: Stop) -> tuple[str, str | None] | None:
    if record.diverged:
        return "diverged", f"round {record.round}: {record.diverged}"
    if record.round >= config.rounds:
        return "finished", None
    if stop.wanted:
        return "interrupted", f"stopped after round {record.round} of {config.rounds}"
    return None


def reopen(
    out: Path, config: Config, progress: RunState, world: dict[str, str]
) -> tuple[RunFolder, list[dict[str, Any]], tuple[str, str | None] | None]:
    """Open a run folder at its last checkpoint, move ``progress`` there, and say how the run had ended, if it had."""
    folder = RunFolder.reopen(out)
    try:
        stored = load_config(out)
        _refuse_changes(out, stored, config, fingerprint(world, stored))
        saved = checkpoint.load(out / "checkpoint")
        if saved is None and (out / "summary.json").exists():
            raise RunFolderError(
                f"the checkpoint of {out} is missing, though the run got to an end: restore {out / 'checkpoint'}, or "
                "remove summary.json and rounds.jsonl to compute all rounds again"
            )
        mark, beside = (saved.records, saved.beside) if saved else (LogMark(), {})
        if saved is not None:
            checkpoint.restore(saved, progress)
        folder.go_on(mark, beside)
        records = without_former_last(config, read_records(out / "rounds.jsonl", mark.size))
        if len(records) != progress.round:
            raise RunFolderError(
                f"{out}: {len(records)} rounds are recorded, the checkpoint is of round {progress.round}"
            )
        if config.rounds < progress.round:
            raise RunFolderError(
                f"rounds = {config.rounds}, but {out} is past round {progress.round}: ask for at least that"
            )
        if any(getattr(config, key) != getattr(stored, key) for key in MAY_CHANGE):
            folder.amend(dataclasses.replace(stored, **{key: getattr(config, key) for key in MAY_CHANGE}))
        if saved is not None:
            checkpoint.adopt(out / "checkpoint", saved)
    except BaseException:
        folder.close()
        raise
    if saved is not None and saved.diverged:
        return folder, records, ("diverged", f"round {saved.round}: {saved.diverged}")
    return folder, records, ("finished", None) if len(records) >= config.rounds else None


def _refuse_changes(out: Path, stored: Config, config: Config, now: dict[str, str]) -> None:
    """Raise if a run folder was made with something else than what is to be continued."""
    different = stored.differences({k: v for k, v in config.asdict().items() if k not in MAY_CHANGE})
    asked, before, free = config.asdict(), stored.asdict(), {*MAY_CHANGE, *EXECUTION_KEYS}
    free |= {table for choice, table in OPTIONS_BY_CHOICE.items() if asked.get(choice) != before.get(choice)}
    different += [f"without {key}" for key in before if before[key] and not asked.get(key) and key not in free]
    if not (out / "environment.json").exists():
        raise RunFolderError(
            f"{out / 'environment.json'} is missing, which says what the run was made with: restore it"
        )
    before = read_json(out / "environment.json").get("fingerprint", {})
    different += [f"other {part}" for part in before if before[part] != now.get(part)]
    if different:
        over, remedy = stored.lr_schedule_options.get("over"), "choose another --out"
        if asked["lr_schedule"] == stored.lr_schedule and over != config.lr_schedule_options.get("over"):
            remedy += (
                f", or give lr_schedule_options = {{'over': {over}}} to go on with the schedule of the first rounds"
            )
        raise RunFolderError(f"{out} was made with another configuration ({'; '.join(different)}): {remedy}")
