"""A comparison: one setting per method over several seeds, on the same partitions, participants and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from feddpc import methods
from feddpc.build import make_method
from feddpc.checks import check_int
from feddpc.config import MAY_CHANGE, Config
from feddpc.errors import BadInputError, RunFolderError
from feddpc.privacy.mechanism import check as check_private
from feddpc.runs.concurrent import run_concurrently
from feddpc.runs.record import is_blank, is_run, load_config
from feddpc.runs.runner import CHECKPOINT_SECONDS, Outcome, Stop
from feddpc.runs.tracking import Track, check
from feddpc.study.folder import StudyFolder
from feddpc.study.overrides import Overrides
from feddpc.study.plan import FILES, StudyPlan, claim
from feddpc.study.spec import RunSpec
from feddpc.study.workers import execute_spec
from feddpc.torch_globals import preserve_torch_globals

__all__ = ["Listener", "Overrides", "compare", "run_name"]


class Listener(Protocol):
    """Follows the progress of a comparison."""

    def begin(self, config: Config) -> None:
        """A run starts or continues."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""

    def end(self, summary: dict[str, Any]) -> None:
        """A run has ended."""

    def another(self) -> Listener:
        """Return a listener for another run at the same time."""


def run_name(method: str, seed: int) -> str:
    """Return the folder name of a run inside a comparison.

    >>> run_name("feddpc", 0)
    'feddpc-seed0'
    """
    return f"{methods.get(method).name}-seed{seed}"


@preserve_torch_globals()
def compare(
    overrides: Overrides,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    resume: bool = False,
    extend: bool = False,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    at_once: int = 1,
    track: Track = (),
) -> list[Outcome]:
    """Run every method with every seed into sub-folders of ``out``, ``at_once`` of them at a time.

    A run that diverges is kept, and the others continue; a request to stop ends the comparison after the round.
    ``resume`` continues the comparison in ``out``; ``extend`` does so with more methods or seeds. The first run is
    alone in any case: with ``engine = "fastest"`` all others use the engine that it chose.
    """
    stop, resume = stop or Stop(), resume or extend
    check_int("at_once", at_once, 1)
    plan = StudyPlan(list(names), list(seeds), overrides)
    trials = zip(*(plan.specs(name, {}) for name in names), strict=True)
    configs = [_checked(spec.config) for seed in trials for spec in seed]
    by_folder = {run_name(config.method, config.seed): config for config in configs}
    if len(by_folder) < len(configs):
        raise BadInputError(f"methods = {', '.join(names)}: two of them have the same name")
    trackers = check(track, out if resume else None)
    _refuse_folder(out, resume)
    begun = {name: load_config(out / name) for name in by_folder if is_run(out / name)}
    for name, stored in begun.items():
        _refuse_changes(out / name, stored, by_folder[name], overrides)
    changes = {k: overrides.values[k] for k in MAY_CHANGE if k in overrides.values}
    by_folder |= {name: Config.read(stored.asdict() | changes) for name, stored in begun.items()}
    specs = {name: RunSpec(config) for name, config in by_folder.items()}
    for spec in specs.values():
        _ = spec.complete  # raises what is wrong before anything is written
    claim(out, plan, extend=extend, runs=list(specs))
    StudyFolder(out).note_code(specs.values(), "finished runs keep their results; for new ones choose another --out")

    def run(name: str, listener: Listener | None, engine: str | None) -> Outcome | None:
        if stop.wanted:
            return None
        if listener:
            listener.begin(specs[name].config)
        outcome = execute_spec(
            specs[name],
            out / name,
            at_once=at_once,
            lean=False,
            engine=engine,
            resume=resume,
            on_round=listener.round if listener else None,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
            track=trackers,
        )
        if listener:
            listener.end(outcome.summary)
        return outcome

    timed = overrides.values.get("engine") == "fastest"
    engine = next((stored.engine for stored in begun.values()), None) if timed else None
    first_name, *rest = specs
    first = run(first_name, listener, engine)
    if first and timed:  # all others use its engine and its compiler, so that seconds can be compared
        engine, compiled = first.config.engine, first.config.compile
        specs |= {n: RunSpec(replace(specs[n].config, compile=compiled)) for n in rest}
    listeners = [listener.another() if listener and at_once > 1 else listener for _ in rest]
    jobs = [partial(run, name, other, engine) for name, other in zip(rest, listeners, strict=True)]
    return [outcome for outcome in (first, *run_concurrently(jobs, at_once)) if outcome]


def _checked(config: Config) -> Config:
    """Return a configuration with all hyper-parameters, after all checks that need no data."""
    method, config = make_method(config)
    method.init_server(torch.zeros(1), config.clients)
    if config.privacy:
        check_private(method)
    return config


def _refuse_folder(out: Path, resume: bool) -> None:
    """Raise unless ``out`` is empty, or a comparison that is to be continued."""
    if is_blank(out):
        return
    if not (out / FILES["comparison"]).exists():
        raise RunFolderError(f"{out} exists and holds something that is no comparison: choose another --out")
    if not resume:
        raise RunFolderError(
            f"{out} already holds a comparison: add --resume to continue it, --extend to add methods or seeds, or "
            "choose another --out"
        )


def _refuse_changes(folder: Path, stored: Config, asked: Config, overrides: Overrides) -> None:
    """Raise if the run in ``folder`` was begun with another configuration."""
    given = {k: v for k, v in overrides.values.items() if k not in (*MAY_CHANGE, "hyper")}
    given |= {"hyper": overrides.hyper.get(asked.method, {}), "seed": asked.seed}
    different = stored.differences(given)
    if asked.reserve is not None and asked.reserve != (stored.reserve or 0.0):  # other methods would get other data
        different.append(f"reserve = {asked.reserve!r}, was {stored.reserve!r}")
    if different:
        raise RunFolderError(
            f"{folder} was made with another configuration ({'; '.join(different)}): choose another --out"
        )
