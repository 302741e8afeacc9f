"""The plan of a study, stored in its folder so that it can be continued, checked and extended.

A comparison tries one setting per method and is stored in ``compare.json``, a sweep several, in ``sweep.toml``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddpc import methods
from feddpc.config import EXECUTION_KEYS, OPTION_TABLES, Config, parse_set, read_toml, write_toml
from feddpc.errors import BadInputError, RunFolderError
from feddpc.registry import code_names, refuse_code
from feddpc.storage import explain_os_errors, make_folder, replace_text
from feddpc.study import space as spaces
from feddpc.study.folder import CODE, RunResult, locked, shared_metric
from feddpc.study.overrides import Overrides, hyper_names
from feddpc.study.space import Categorical, Search, Settings, Space, spelled
from feddpc.study.spec import RunSpec

FILES = {"comparison": "compare.json", "sweep": "sweep.toml"}
#: Other files and folders of a sweep.
SWEEP_PARTS = (
    *("items", "failed", "damaged", ".lock", ".study-id", ".sweep.toml.part", CODE),
    *("results.jsonl", "results.csv", "order.json", "chosen.json"),
)
#: What ``--extend`` may add to.
EXTENDABLE = ("methods", "seeds", "grid", "trials")


@dataclass(frozen=True)
class StudyPlan:
    """Methods, seeds, what all runs have in common (``overrides``) and what varies (``space``; None in a comparison).

    ``objective`` is what an adaptive search and a ``ladder`` maximize. In a ladder only the better settings run to the
    end, see :mod:`feddpc.study.ladder`.
    """

    methods: Sequence[str]
    seeds: Sequence[int]
    overrides: Overrides
    space: Space | None = None
    objective: str = "validation"
    ladder: bool = False

    def __post_init__(self) -> None:
        for what, values in (("methods", self.methods), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise BadInputError(f"{what} = {', '.join(map(str, values))}: give at least one, and none twice")
        if self.space is None:
            return
        if self.ladder and self.space.trials is not None:
            raise BadInputError("--ladder is for --grid: it looks beyond the ends of the listed values")
        for key in self.space.axes:
            if self.ladder and _plain(key) == "rounds":
                raise BadInputError("--ladder sets how long each setting runs: leave rounds out of the grid")
            if _plain(key) in EXECUTION_KEYS:
                raise BadInputError(f"{key} does not change the results, so it cannot be tuned: leave it out")
            Overrides().set(_plain(key), 0, self.methods)  # an unknown key is an error that names the known ones
        if self.objective == "validation" and not self.overrides.values.get("validation"):
            raise BadInputError(
                "a choice by validation needs validation data: give validation, e.g. 0.1, or choose by test"
            )

    @property
    def kind(self) -> str:
        """``comparison`` or ``sweep``."""
        return "comparison" if self.space is None else "sweep"

    @property
    def rounds(self) -> int:
        """The rounds of a run, in a ladder those of its last rung, unless they are varied."""
        return int(self.overrides.values.get("rounds") or Config.rounds)

    def keys(self, method: str) -> list[str]:
        """Return what is varied for a method."""
        return [key for key in self.space.axes if _has(method, _plain(key))] if self.space else []

    def draws(self, keys: Sequence[str]) -> bool:
        """Say whether one of ``keys`` is drawn at random, so that the first trials need not have all its values."""
        return self.space is not None and self.space.trials is not None and any(key in self.space.axes for key in keys)

    def budgets(self) -> dict[str, int]:
        """Return how many settings are tried per method."""
        return {name: self.space.size(self.keys(name)) if self.space else 1 for name in self.methods}

    def searches(self) -> dict[str, Search]:
        """Return the trials of every method, from the first on."""
        return {name: self.space.search(self.keys(name)) for name in self.methods} if self.space else {}

    def ladder_settings(self) -> dict[str, list[Settings]]:
        """Return what a ladder begins with per method: as many settings for each, where rates can fill up."""
        return spaces.equal_budgets({method: search.ask() for method, search in self.searches().items()})

    def specs(self, method: str, settings: Settings) -> list[RunSpec]:
        """Return the runs of one trial, one per seed."""
        overrides = self.overrides.copy()
        for key, value in settings.items():
            overrides.set(_plain(key), value, [method])
        words = " ".join([methods.get(method).name, *(f"{_short(k)}={_word(v)}" for k, v in settings.items())])
        reserve = self._reserve(overrides.config(method))
        return [
            RunSpec(overrides.config(method, seed=seed, reserve=reserve), f"{words} seed {seed}", settings)
            for seed in self.seeds
        ]

    def score(self, trial: Sequence[RunResult]) -> float | None:
        """Return the score of a trial, which searches maximize."""
        return trial_score(trial, self.objective)

    def _reserve(self, config: Config) -> float:
        """Return the share of the data that the server keeps: the same for all methods, unless a trial needs more."""
        if config.reserve is not None:
            return config.reserve
        others = [methods.create(name, **self.overrides.hyper.get(name, {})) for name in self.methods]
        return max(m.reserve for m in (*others, methods.create(config.method, **config.hyper)))

    def extended(self, more: StudyPlan) -> StudyPlan:
        """Return this plan with the methods, seeds, grid values and trials that ``more`` adds."""
        names = list(dict.fromkeys([*self.methods, *more.methods]))
        seeds = list(dict.fromkeys([*self.seeds, *more.seeds]))
        space = self.space.extended(more.space) if self.space and more.space else more.space
        return dataclasses.replace(more, methods=names, seeds=seeds, space=space)

    # The plan as plain values, for a file.

    def as_table(self) -> dict[str, Any]:
        """Return the plan as plain values; a sweep leaves out what only changes its speed."""
        values = dict(self.overrides.values)
        tables = dict(self.overrides.hyper)
        if self.space is not None:
            values = {k: v for k, v in values.items() if k not in EXECUTION_KEYS}
            tables = {part: values.pop(name, {}) for part, name in OPTION_TABLES.items()} | tables
        sets = [f"{name}.{k}={spelled([v])}" for name, table in tables.items() for k, v in table.items()]
        table: dict[str, Any] = {"methods": list(self.methods), "seeds": list(self.seeds)}
        if space := self.space:
            table["grid" if space.trials is None else "random"] = [f"{k}={a}" for k, a in space.axes.items()]
            if space.trials is not None:
                table |= {"trials": space.trials, "search_seed": space.seed}
            if space.sampler is not None:
                table |= {"sampler": space.sampler, "batch": space.batch, "objective": self.objective}
            if self.ladder:
                table |= {"ladder": True, "objective": self.objective}
        return {**table, "set": sets, "config": values}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> StudyPlan:
        """Build a plan from what :meth:`as_table` returned."""
        names, values = [str(n) for n in table["methods"]], dict(table.get("config", {}))
        overrides = Overrides()
        overrides.absorb(values, names)
        for text in table.get("set", []):
            overrides.set(*parse_set(text), names)
        space = None
        if "grid" in table or "random" in table:
            trials = (table.get("trials"), table.get("sampler"), int(table.get("search_seed", 0)), table.get("batch"))
            space = make_space(table.get("grid", []), table.get("random", []), *trials)
        objective = str(table.get("objective", "validation" if values.get("validation") else "test"))
        seeds = [int(seed) for seed in table["seeds"]]
        return cls(names, seeds, overrides, space, objective, bool(table.get("ladder")))


def trial_score(trial: Sequence[RunResult], by: str) -> float | None:
    """Return the mean over seeds of what is chosen ``by``, higher is better: negative for a metric to minimize.

    It is the worst if a seed diverged or has no value, and None if one could not be run.
    """
    if any(not result.ended for result in trial):
        return None
    metric = shared_metric(trial)
    worst = 0.0 if metric.percent and metric.direction == "max" else -math.inf
    if any(result.status == "diverged" for result in trial):
        return worst
    scores = [result.score(by) for result in trial]
    return statistics.fmean(worst if score is None else metric.sign * score for score in scores)


def make_space(
    grid: Sequence[str], random: Sequence[str], trials: int | None, sampler: str | None, seed: int, batch: int | None
) -> Space:
    """Build a space from the flags of the command line."""
    if bool(grid) == bool(random):
        raise BadInputError("say what to vary: either --grid KEY=VALUE,VALUE or --random KEY=RANGE, one flag per key")
    axes = {}
    for text in grid or random:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInputError(f"{'--grid' if grid else '--random'} {text!r}: write KEY=...")
        if key.strip() in axes:
            raise BadInputError(f"{key.strip()} is there twice: give each key once, with all its values")
        axes[key.strip()] = Categorical(tuple(spaces.values(value))) if grid else spaces.parse(value)
    if grid and (trials is not None or sampler is not None):
        raise BadInputError("--trials and --sampler are for --random: a grid tries everything")
    if random and trials is None:
        raise BadInputError("--random needs --trials N: how many settings per method")
    more = {} if batch is None else {"batch": batch}
    return Space(axes, trials, seed, sampler, **more)


def stored_plan(folder: Path, kind: str, asked: Any = ()) -> StudyPlan | None:
    """Return the plan of the comparison or sweep in ``folder``, or None if there is none.

    Reading a plan may run the code of the user's own that it names. A folder may come from anybody, so code that is
    not named in ``asked``, what the user gave, is refused first.
    """
    path = folder / FILES[kind]
    if not path.exists():
        return None
    with _explained(path):
        table = read_toml(path) if path.suffix == ".toml" else json.loads(path.read_text(encoding="utf-8"))
    refuse_code(folder, code_names(table), code_names(asked))
    with _explained(path):
        plan = StudyPlan.from_table(table)
        if plan.kind != kind:
            raise ValueError(f"it is the plan of a {plan.kind}")
    return plan


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an error that names it: a file can hold anything."""
    try:
        yield
    except Exception as e:
        raise RunFolderError(f"{path} cannot be read: {e}; repair it, or choose another --out") from None


def claim(folder: Path, plan: StudyPlan, *, extend: bool = False, runs: Sequence[str] = ()) -> None:
    """Store the plan in ``folder``, or check that it is the one that is there.

    With ``extend`` it may have more methods, seeds, grid values and trials. ``runs`` are the run folders of a
    comparison, in the order of its table.
    """
    refuse_another(folder, plan, extend=extend)
    make_folder(folder)
    with locked(folder):
        refuse_another(folder, plan, extend=extend)
        before = stored_plan(folder, plan.kind, plan.as_table()) if extend else None
        path, table = folder / FILES[plan.kind], (before.extended(plan) if before else plan).as_table()
        if plan.space is None:
            replace_text(path, json.dumps({"runs": list(runs), **table}, indent=1) + "\n")
        elif extend or not path.exists():
            replace_text(path, write_toml(table))


def refuse_another(folder: Path, plan: StudyPlan, *, extend: bool = False) -> None:
    """Raise if ``folder`` holds another study than ``plan``, or something else."""
    before = stored_plan(folder, plan.kind, plan.as_table())
    if before is None:
        with explain_os_errors(folder):
            names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        if foreign := [name for name in names if name not in SWEEP_PARTS] if plan.space else []:
            raise RunFolderError(
                f"{folder} holds {foreign[0]}, which is no part of a {plan.kind}: choose another --out"
            )
        return
    different = differences(before, plan)
    if plan.space is None:  # its values are compared with those of the runs
        different = {key: text for key, text in different.items() if key in EXTENDABLE}
    if extend:
        different = {key: text for key, text in different.items() if key not in EXTENDABLE}
    if not different:
        return
    remedy = "choose another --out"
    if plan.space is not None:
        remedy += f"; runs that both have need not be made again if you copy {folder / 'items'} there"
    if set(different) & {*EXTENDABLE}:
        remedy = f"add --extend to add methods, seeds or settings to it, or {remedy}"
    raise RunFolderError(f"{folder} holds another {plan.kind} ({'; '.join(different.values())}): {remedy}")


def extend_stored(folder: Path, plan: StudyPlan) -> StudyPlan:
    """Return the plan stored in ``folder`` with what ``plan`` adds to it."""
    before = stored_plan(folder, plan.kind, plan.as_table())
    if before is None:
        raise RunFolderError(f"{folder} holds no {plan.kind} to extend: leave out --extend to start one")
    return before.extended(plan)


def differences(before: StudyPlan, now: StudyPlan) -> dict[str, str]:
    """Say where two plans differ, by key."""
    old, new = before.as_table(), now.as_table()
    for table in (old, new):
        table |= table.pop("config")
    keys = dict.fromkeys([*old, *new])
    return {k: f"{k} = {new.get(k)!r}, was {old.get(k)!r}" for k in keys if old.get(k) != new.get(k)}


def _has(method: str, key: str) -> bool:
    """Say whether ``key``, which is known to exist, applies to a method."""
    part, _, name = key.rpartition(".")
    if part:
        return part in OPTION_TABLES or part in (method, methods.get(method).name)
    return name in hyper_names(method) or name in Config.__dataclass_fields__


def _plain(key: str) -> str:
    return key.removeprefix("hyper.")


def _short(key: str) -> str:
    return key if key.partition(".")[0] in OPTION_TABLES else key.rpartition(".")[2]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
