"""What a sweep sets out to do, written down as ``sweep.toml`` so that it can be continued and checked."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddpc import methods
from feddpc.config import PARTS, Config, parse_set, read_toml, write_toml
from feddpc.errors import BadInputError, RunFolderError
from feddpc.experiment import make_method
from feddpc.storage import explain_os_errors, replace_text
from feddpc.study import ranges
from feddpc.study.claims import locked
from feddpc.study.compare import Overrides, hyper_names
from feddpc.study.item import HOW, Item
from feddpc.study.outcome import Outcome
from feddpc.study.ranges import spelled
from feddpc.study.space import Search, Settings, Space
from feddpc.study.store import PARTS_OF_A_SWEEP

FILE = "sweep.toml"


@dataclass(frozen=True)
class SweepPlan:
    """Methods, seeds, what they have in common (``wishes``), what varies (``space``), and what a search maximises."""

    methods: Sequence[str]
    seeds: Sequence[int]
    wishes: Overrides
    space: Space
    objective: str = "validation"

    def __post_init__(self) -> None:
        for what, values in (("methods", self.methods), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise BadInputError(f"{what} = {', '.join(map(str, values))}: give at least one, and none twice")
        for key in self.space.axes:
            if _plain(key) in HOW:
                raise BadInputError(
                    f"{key} does not change what comes out, so there is nothing to choose: leave it out"
                )
            Overrides().set(_plain(key), 0, self.methods)  # an unknown key is an error that names those there are
        if self.objective == "validation" and not self.wishes.values.get("validation"):
            raise BadInputError(
                "a choice by validation needs validation data: give validation, e.g. 0.1, or choose by test"
            )

    def keys(self, method: str) -> list[str]:
        """Return what is varied for a method."""
        return [key for key in self.space.axes if _has(method, _plain(key))]

    def budgets(self) -> dict[str, int]:
        """Return how many settings each method gets to try."""
        return {name: self.space.size(self.keys(name)) for name in self.methods}

    def searches(self) -> dict[str, Search]:
        """Return the trials of every method, from the beginning."""
        return {name: self.space.search(self.keys(name)) for name in self.methods}

    def items(self, method: str, settings: Settings) -> list[Item]:
        """Return the runs of one trial: one a seed."""
        wishes = Overrides(
            {k: dict(v) if isinstance(v, dict) else v for k, v in self.wishes.values.items()},
            {name: dict(table) for name, table in self.wishes.hyper.items()},
        )
        for key, value in settings.items():
            wishes.set(_plain(key), value, [method])
        words = " ".join([methods.get(method).name, *(f"{_short(k)}={_word(v)}" for k, v in settings.items())])
        reserve = self._reserve(wishes.config(method))
        return [
            Item(dataclasses.replace(wishes.config(method, seed), reserve=reserve), f"{words} seed {seed}", settings)
            for seed in self.seeds
        ]

    def score(self, trial: Sequence[Outcome]) -> float | None:
        """Return how a trial did: the mean over seeds, 0 if one diverged, None if one could not be run."""
        if any(not outcome.ended for outcome in trial):
            return None
        scores = [outcome.score(self.objective) for outcome in trial]
        if any(outcome.status == "diverged" for outcome in trial):
            return 0.0
        return statistics.fmean(score or 0.0 for score in scores)

    def _reserve(self, config: Config) -> float:
        """Return how much of the data the server keeps: the same for all methods, unless a trial needs more."""
        if config.reserve is not None:
            return config.reserve
        others = [methods.create(name, **self.wishes.hyper.get(name, {})) for name in self.methods]
        return max(m.reserve for m in (*others, make_method(config)[0]))

    # Writing down and reading back.

    def as_toml(self) -> dict[str, Any]:
        """Return the plan as plain values; what only changes how fast it goes is left out."""
        values = {k: v for k, v in self.wishes.values.items() if k not in HOW}
        sets = [f"{part}.{k}={spelled([v])}" for part, name in PARTS.items() for k, v in values.pop(name, {}).items()]
        sets += [f"{name}.{k}={spelled([v])}" for name, table in self.wishes.hyper.items() for k, v in table.items()]
        space = self.space
        told: dict[str, Any] = {
            "grid" if space.trials is None else "random": [f"{k}={a}" for k, a in space.axes.items()]
        }
        if space.trials is not None:
            told |= {"trials": space.trials, "search_seed": space.seed}
        if space.sampler is not None:
            told |= {"sampler": space.sampler, "batch": space.batch, "objective": self.objective}
        return {"methods": list(self.methods), "seeds": list(self.seeds), **told, "set": sets, "config": values}


def from_toml(table: Mapping[str, Any]) -> SweepPlan:
    """Build a plan from what :meth:`Plan.as_toml` gave."""
    names, values = [str(n) for n in table["methods"]], dict(table.get("config", {}))
    wishes = Overrides()
    wishes.absorb(values, names)
    for text in table.get("set", []):
        wishes.set(*parse_set(text), names)
    return SweepPlan(
        names,
        [int(seed) for seed in table["seeds"]],
        wishes,
        make_space(
            table.get("grid", []),
            table.get("random", []),
            table.get("trials"),
            table.get("sampler"),
            int(table.get("search_seed", 0)),
            table.get("batch"),
        ),
        str(table.get("objective", "validation" if values.get("validation") else "test")),
    )


def make_space(
    grid: Sequence[str], random: Sequence[str], trials: int | None, sampler: str | None, seed: int, batch: int | None
) -> Space:
    """Build a space from what the command line says."""
    if bool(grid) == bool(random):
        raise BadInputError("say what to vary: either --grid KEY=VALUE,VALUE or --random KEY=RANGE, once a key")
    axes = {}
    for text in grid or random:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInputError(f"{'--grid' if grid else '--random'} {text!r}: write KEY=...")
        if key.strip() in axes:
            raise BadInputError(f"{key.strip()} is there twice: give each key once, with all its values")
        axes[key.strip()] = ranges.Choice(tuple(ranges.values(value))) if grid else ranges.parse(value)
    if grid and (trials is not None or sampler is not None):
        raise BadInputError("--trials and --sampler are for --random: a grid tries everything")
    if random and trials is None:
        raise BadInputError("--random needs --trials N: how many settings of each method")
    more = {} if batch is None else {"batch": batch}
    return Space(axes, trials, seed, sampler, **more)


def stored(folder: Path) -> SweepPlan | None:
    """Return the plan of the sweep in ``folder``, or None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return from_toml(read_toml(path))
    except (BadInputError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; mend it, or choose another --out") from None


def claim(folder: Path, plan: SweepPlan) -> None:
    """Write the plan down in ``folder``, or check that it is the one that is there."""
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not (folder / FILE).exists():
            foreign = sorted(p.name for p in folder.iterdir() if p.name not in (*PARTS_OF_A_SWEEP, f".{FILE}.part"))
            if foreign:
                raise RunFolderError(f"{folder} holds {foreign[0]}, which is no part of a sweep: choose another --out")
            replace_text(folder / FILE, write_toml(plan.as_toml()))
    refuse_another(folder, plan)


def refuse_another(folder: Path, plan: SweepPlan) -> None:
    """Raise if ``folder`` holds another sweep than ``plan``."""
    before = stored(folder)
    if before is not None and (different := differences(before, plan)):
        raise RunFolderError(
            f"{folder} holds another sweep ({'; '.join(different)}): choose another --out; runs that both have need "
            f"not be made again if you copy {folder / 'items'} there"
        )


def differences(before: SweepPlan, now: SweepPlan) -> list[str]:
    """Say where two plans differ."""
    old, new = before.as_toml(), now.as_toml()
    for table in (old, new):
        table |= table.pop("config")
    return [
        f"{k} = {new.get(k)!r}, was {old.get(k)!r}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)
    ]


def _has(method: str, key: str) -> bool:
    """Say whether a method has something called ``key``, which is known to exist."""
    part, _, name = key.rpartition(".")
    if part:
        return part in PARTS or part in (method, methods.get(method).name)
    return name in hyper_names(method) or name in Config.__dataclass_fields__


def _plain(key: str) -> str:
    return key.removeprefix("hyper.")


def _short(key: str) -> str:
    return key if key.partition(".")[0] in PARTS else key.rpartition(".")[2]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
