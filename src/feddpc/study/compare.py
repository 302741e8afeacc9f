"""A comparison: one setting per method over several seeds, on the same partitions, participants and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from feddpc import methods
from feddpc.build import construct
from feddpc.callbacks import Callback
from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.errors import BadInputError, RunFolderError
from feddpc.experiment import Experiment
from feddpc.methods.base import Method
from feddpc.privacy.mechanism import check as check_private
from feddpc.ranks import refuse_ranks
from feddpc.resolve import resolve
from feddpc.runs.concurrent import run_concurrently
from feddpc.runs.record import is_blank, is_run, resumed_config
from feddpc.runs.runner import CHECKPOINT_SECONDS, Listener, Outcome
from feddpc.runs.stop import Stop
from feddpc.runs.tracking import Track, check
from feddpc.study import setup_cache
from feddpc.study.folder import StudyFolder
from feddpc.study.overrides import Overrides
from feddpc.study.plan import FILES, StudyPlan, claim
from feddpc.study.spec import RunSpec
from feddpc.study.workers import execute_shared
from feddpc.torch_globals import preserve_torch_globals
from feddpc.unused import refuse_unused

__all__ = ["ComparisonParts", "Overrides", "compare", "run_comparison", "run_name"]


@dataclass(frozen=True)
class ComparisonParts:
    """What a comparison uses in place of what its configurations name: data, network, partition and methods."""

    parts: Mapping[str, Any] = field(default_factory=dict)  #: what `feddpc.build.build` takes
    methods: Mapping[str, Method] = field(default_factory=dict)  #: by the names that the comparison gives them
    _built: dict[str, Experiment] = field(default_factory=dict, init=False, repr=False)

    def method(self, name: str, hyper: Mapping[str, Any]) -> Method:
        """Return the method ``name``, the caller's own or a registered one with these hyper-parameters."""
        return self.methods[name] if name in self.methods else methods.create(name, **hyper)

    def resolve(self, config: Config, name: str) -> Config:
        """Return a configuration that says exactly what will be computed, or raise what is wrong with it."""
        return resolve(config, method=self.methods.get(name), **self._parts(config))

    def experiment(self, config: Config) -> Experiment:
        """Return the experiment of a resolved configuration; runs with the same seed share what is built once."""
        if not self.parts:
            return setup_cache.experiment(config)
        key = setup_cache.setup_key(config)
        if key not in self._built:
            self._built.clear()
            self._built[key] = construct(config, **self._parts(config))
        return replace(self._built[key], config=config)

    def _parts(self, config: Config) -> dict[str, Any]:
        return {"data": setup_cache.dataset(config), **self.parts} if "data" not in self.parts else dict(self.parts)


def run_name(method: str, seed: int) -> str:
    """Return the folder name of a run inside a comparison.

    >>> run_name("feddpc", 0), run_name("feddpc lam=0.5", 1)
    ('feddpc-seed0', 'feddpc-lam=0.5-seed1')
    """
    return f"{method.replace(' ', '-').replace('/', '-')}-seed{seed}"


def compare(overrides: Overrides, names: Sequence[str], seeds: Sequence[int], out: Path, **how: Any) -> list[Outcome]:
    """Run every method with every seed into sub-folders of ``out``, as :func:`run_comparison` does."""
    return list(run_comparison(overrides, names, seeds, out, **how).values())


@preserve_torch_globals()
def run_comparison(
    overrides: Overrides,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path | None,
    *,
    own: ComparisonParts | None = None,
    resume: bool = False,
    extend: bool = False,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    at_once: int = 1,
    track: Track = (),
    callbacks: Sequence[Callback] = (),
) -> dict[tuple[str, int], Outcome]:
    """Run every method with every seed, ``at_once`` of them at a time; return what came out by method and seed.

    With ``out``, each run has a sub-folder there. A run that diverges is kept, and the others continue; a request to
    stop ends the comparison after the round. ``resume`` continues the comparison in ``out``; ``extend`` does so with
    more methods or seeds. The first run is alone in any case, so that what is wrong with all is said once.
    """
    refuse_ranks("a comparison")
    stop, resume, own = stop or Stop(), resume or extend, own or ComparisonParts()
    check_int("at_once", at_once, 1)
    plan = StudyPlan(list(names), list(seeds), overrides)
    trackers = check(track, out if resume else None)
    if out is not None:
        _refuse_folder(out, resume)
    runs = _plan_runs(plan, own, out)  # raises what is wrong before anything is written
    is_new = out is not None and is_blank(out)
    if out is not None:
        claim(out, plan, extend=extend, runs=[run.name for run in runs.values()])
        remedy = "finished runs keep their results; for new ones choose another --out"
        StudyFolder(out).note_code([RunSpec(run.config) for run in runs.values()], remedy)
    elif trackers:
        raise BadInputError("track needs a folder that holds the runs too: give out")

    def execute_run(key: tuple[str, int], listener: Listener | None) -> Outcome | None:
        if stop.wanted:
            return None
        run = runs[key]
        return execute_shared(
            partial(own.experiment, run.config),
            at_once=at_once,
            method=own.methods.get(key[0]),
            out=None if out is None else out / run.name,
            resume=resume,
            listener=listener,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
            track=trackers,
            callbacks=callbacks,
        )

    first_key, *rest = runs
    try:
        first = execute_run(first_key, listener)
    except BadInputError:
        if out is not None and is_new and not is_run(out / runs[first_key].name):
            _withdraw(out)
        raise
    listeners = [listener.another() if listener and at_once > 1 else listener for _ in rest]
    jobs: list[Callable[[], Outcome | None]] = [
        partial(execute_run, key, other) for key, other in zip(rest, listeners, strict=True)
    ]
    outcomes = dict(zip(runs, (first, *run_concurrently(jobs, at_once)), strict=True))
    return {key: outcome for key, outcome in outcomes.items() if outcome}


@dataclass(frozen=True)
class _PlannedRun:
    """One run of a comparison."""

    name: str  #: of its folder
    config: Config  #: resolved


def _plan_runs(plan: StudyPlan, own: ComparisonParts, out: Path | None) -> dict[tuple[str, int], _PlannedRun]:
    """Return the runs by method and seed, in their order; those that ``out`` holds are as they were begun.

    The server keeps the same share of the data for all methods: what the most demanding one needs.
    """
    values, hyper = plan.overrides.values, plan.overrides.hyper
    methods_by_name = {name: own.method(name, hyper.get(name, {})) for name in plan.methods}
    reserve = values.get("reserve", max(method.reserve for method in methods_by_name.values()))
    runs = {}
    fresh: list[tuple[dict[str, Any], Config]] = []
    for seed in plan.seeds:
        for name, method in methods_by_name.items():
            label = name if name in own.methods else method.name
            folder = run_name(label, seed)
            config = plan.overrides.config(name, seed=seed, reserve=reserve)
            method.init_server(torch.zeros(1), config.clients)
            begun = False
            if out is not None and is_run(out / folder):
                given = values | {"hyper": hyper.get(name, {}), "seed": seed, "reserve": reserve}
                config = resumed_config(out / folder, given)
                begun = True
            config = own.resolve(config, name)
            if config.privacy:
                check_private(method)
            if not begun:
                fresh.append((values, config))
            runs[name, seed] = _PlannedRun(folder, config)
    refuse_unused(fresh)
    if len({run.name for run in runs.values()}) < len(runs):
        raise BadInputError(f"methods = {', '.join(plan.methods)}: two of them have the same name")
    return runs


def _withdraw(out: Path) -> None:
    """Leave a folder empty again whose first run was refused, so that the corrected comparison can have it."""
    with suppress(OSError):
        for path in out.iterdir():
            path.unlink() if path.is_file() else path.rmdir()
        out.rmdir()


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
