"""Running one experiment, from round 1 or from its last checkpoint, with records and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from feddpc import methods
from feddpc.callbacks import Callback, Callbacks, Run
from feddpc.config import Config, code_in
from feddpc.engines.base import Engine
from feddpc.engines.distributed import Distributed
from feddpc.experiment import Experiment
from feddpc.method_changes import for_method
from feddpc.methods.base import Method, State
from feddpc.own_functions import describe
from feddpc.ranks import Ranks, join, place
from feddpc.registry import code_digest, short_name
from feddpc.resolve import resolve_device
from feddpc.round.placement import Placement, part_of, resolve
from feddpc.round.round import RoundRecord, run_round
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.best_model import BestModel
from feddpc.runs.engine_choice import choose_engine
from feddpc.runs.environment import environment, versions
from feddpc.runs.keeper import ENDED, Keeper, check_shared
from feddpc.runs.provenance import hashes_of, holdings, privacy_note
from feddpc.runs.record import (
    LEARNED,
    RunFolder,
    is_run,
    line,
    load_config,
    numbers_digest,
    read_json,
)
from feddpc.runs.reopen import fingerprint, reopen
from feddpc.runs.stop import Stop
from feddpc.runs.summary import summarize
from feddpc.runs.tracking import Track, Tracking
from feddpc.task_parts import registered_code
from feddpc.torch_globals import set_precision

OnRound = Callable[[dict[str, Any]], None]

#: Seconds between checkpoints, unless asked otherwise.
CHECKPOINT_SECONDS = 5.0


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
    out: Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    lean: bool = False,
    extendable: bool = False,
    track: Track = (),
    examine: Callable[[Experiment], None] | None = None,
    callbacks: Sequence[Callback] = (),
    last_use: bool = False,
) -> Outcome:
    """Run ``experiment.config`` to its last round and return what came out.

    With ``out`` everything is recorded in that folder as it happens, with a checkpoint every ``checkpoint_seconds``;
    with ``resume`` a run that is there is continued.
    A ``lean`` run is one of many: when it has ended it leaves its records, but neither its model nor a checkpoint; if
    it is ``extendable`` it leaves a checkpoint, from which it can be continued for more rounds.
    ``track`` names who else is told of the rounds; a resumed run goes on with those it had. ``examine`` sees what the
    method made of the experiment, and may raise, before anything is written. ``callbacks`` may stop the run; if one of
    them raises an error, the round is kept and the run can be resumed. ``last_use``: no other run needs the experiment,
    and this one may overwrite its first model, which saves a copy.
    """
    stop = stop or Stop()
    asked = experiment.config
    ranks = join(resolve_device(asked.device), asked.rank_timeout)
    first = not ranks.rank  # of several ranks, the one that shows and records what happens
    tracking = Tracking.of(track if first else (), out, resume)
    listener = listener if first else None
    name = asked.method if method is None else method.name
    method = method or methods.create(asked.method, **asked.hyper)
    set_precision(asked.precision)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    resume = resume and out is not None and is_run(out)
    with ranks.together("preparing the run"):
        stored = load_config(out) if resume and out is not None else None
        experiment = for_method(experiment, method, _learned(out) if resume and out is not None else None)
        if examine is not None:
            examine(experiment)
        machine = _engine(asked, stored, experiment, method, ranks)
        memory = stored.client_memory if stored is not None and asked.client_memory == "auto" else asked.client_memory
        kind = resolve(memory, method, experiment.w0, len(experiment.population))
        config = dataclasses.replace(
            asked,
            method=name,
            hyper=method.hyper(),
            device=resolve_device(asked.device),
            threads=experiment.threads,
            engine=machine.name,
            inner_engine=machine.inner.name if isinstance(machine, Distributed) else "auto",
            compile=getattr(machine, "compile", False),
            client_memory=kind,
            data_memory="device" if experiment.task.host is None else "host",
        )
        placement = Placement(kind, out / "checkpoint" if out is not None else None, part_of(ranks.rank, ranks.size))
        state = RunState.of(experiment, method, placement, own=last_use)
        made_of = hashes_of(experiment) | _code(method, config) if out is not None or ranks.size > 1 else {}
    ranks.compare(versions() | made_of | {"configuration": numbers_digest(config)}, "version, data or configuration")
    folder: RunFolder | None = None
    records: list[dict[str, Any]] = []
    ended: tuple[str, str | None] | None = None
    if out is not None and resume:
        folder, records, ended = reopen(out, config, state, made_of, ranks)
    elif out is not None:
        with ranks.together("making the run folder"):
            about = environment(
                machine.name, config.device, fingerprint(made_of, config), experiment.task.metrics, ranks.size
            )
            folder = _begin(out, config, experiment, method, about, lean) if first else None
        with ranks.together("looking at the run folder"):
            if not first:
                check_shared(out, ranks.rank)
    keeper = Keeper(folder, out, state, checkpoint_seconds, lean and not extendable, ranks)
    watching = Callbacks(callbacks, Run(config, experiment, method, state, records, out))
    summary: dict[str, Any] | None = None
    clients = _stored_clients(out, state.round) if resume and out is not None else {}
    try:
        best = None
        if config.keep == "best":
            past = records[:-1] if ended is not None and ended[0] == "diverged" else records
            part = "test" if experiment.validate is None else "validation"
            best = BestModel(experiment.task.metrics[0], part, method, state, past)
        if out is not None:
            tracking.begin(config, out, records)
        if listener is not None:
            listener.begin(config)
        watching.call("on_run_begin")
        while ended is None:
            record = run_round(experiment, method, machine, state)
            records.append(json.loads(line(record)))
            if best is not None:
                best.see(records[-1], record.diverged)
            if record.client_metrics:
                clients = record.client_metrics
                if folder is not None:
                    folder.note("clients", {"round": record.round, "metrics": clients}, indent=None)
            try:
                watching.call("on_round_end")
            except Exception:
                if ranks.size == 1:
                    keeper.keep(record, _why(record, config, stop) or ("interrupted", None))
                raise
            ended = keeper.agree(_why(record, config, stop) or watching.run.stopped)
            keeper.keep(record, ended)
            tracking.round(records[-1])
            if listener is not None:
                listener.round(records[-1])
            if on_round is not None:
                on_round(records[-1])
        status, reason = ended
        summary = summarize(config, records, status, reason, experiment.task.metrics)
        summary["costs"] = state.meter.summary()
        kept = state.model(method)
        if best is not None and state.best is not None:
            kept, summary["model_round"] = state.best, best.round
        if folder is not None:
            if not lean:
                checkpoint.save_model(folder.path / "model.safetensors", experiment.task.flat.state_dict(kept))
            folder.finish(summary)
            if lean and not extendable and status in ENDED:
                shutil.rmtree(folder.checkpoint, ignore_errors=True)
        watching.run.status = status
        watching.call("on_run_end")
        if listener is not None:
            listener.end(summary)
    except Exception as error:
        ranks.failed(error)
        raise
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
        folder.note("privacy", privacy_note(experiment, method))
        if not lean:
            folder.note("holdings", holdings(experiment), indent=None)
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
    own |= {f"code of {name}": text for name, text in registered_code(config).items()}
    if type(method).__module__.startswith("feddpc."):
        return own
    return own | {f"code of {method.name}": describe(type(method))}


def _learned(out: Path) -> State | None:
    """Return what the method had found out before round 1, if it got so far."""
    return checkpoint.load_model(out / LEARNED) if (out / LEARNED).exists() else None


def _engine(asked: Config, stored: Config | None, experiment: Experiment, method: Method, ranks: Ranks) -> Engine:
    """Return the engine that was asked for; a resumed run keeps the one it has unless another was asked for."""
    name, inner, compile = asked.engine, asked.inner_engine, asked.compile
    if stored is not None and name == stored.engine and place() is not None:
        name, inner = (
            "auto",
            "auto" if stored.engine != "distributed" else inner,
        )  # ranks go on with what one process began
    if stored is not None and name == "auto" and place() is None:
        name, compile = stored.engine, stored.compile
        inner = stored.inner_engine if inner == "auto" and name == "distributed" else inner
    return choose_engine(name, experiment, method, compile=compile, inner=inner, ranks=ranks)


def _why(record: RoundRecord, config: Config, stop: Stop) -> tuple[str, str | None] | None:
    if record.diverged:
        return "diverged", f"round {record.round}: {record.diverged}"
    if record.round >= config.rounds:
        return "finished", None
    if stop.wanted:
        return "interrupted", f"stopped after round {record.round} of {config.rounds}"
    return None
