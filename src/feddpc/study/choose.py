"""Which settings win, chosen on held-out training samples or, as the paper does, on the test set."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc.config import TUNED_KEYS, Config
from feddpc.errors import BadInputError, unknown
from feddpc.study.folder import RunResult, shared_metric
from feddpc.study.space import Categorical, Range
from feddpc.study.spec import settings
from feddpc.tasks.metrics import Metric

BY = ("validation", "test")
#: Standard deviation over seeds, of a share from 0 to 1, above which a chosen setting is flagged.
SCATTER = 0.05


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best settings of one method for one problem, and what choosing them cost.

    Values are those of the primary ``metric``. ``test`` is, for a choice by validation, that on the test set in the
    round that validation data choose; for a choice by test it is the best of any round, which is optimistic.
    """

    method: str
    by: str  #: validation or test
    problem: dict[str, Any]  #: what distinguishes the problem from the others of this study
    settings: dict[str, Any] | None  #: None where nothing can be chosen
    metric: Metric  #: what was maximized, or minimized
    score: float | None  #: mean over seeds of what was chosen by
    test: float | None
    test_spread: float | None  #: sample standard deviation over seeds
    last10: float | None
    round: int | None  #: mean of the seeds' chosen rounds
    results: list[RunResult]  #: the runs of the winner, one per seed
    tried: int  #: settings of which every seed ran to its end, or as far as a ladder let it
    diverged: int
    failed: int
    missing: int
    seeds: int
    rounds: int  #: of every run, in a ladder of those that ran to the end
    finalists: int | None = None  #: in a ladder: settings that ran to the end
    spent: int = 0  #: rounds of all runs
    spread: float | None = None  #: sample standard deviation of the score over seeds
    grid_ends: list[str] = field(default_factory=list)  #: keys whose best value is the smallest or largest of the grid

    @property
    def count(self) -> int:
        """How many settings there are in total."""
        return self.tried + self.diverged + self.failed + self.missing

    @property
    def budget(self) -> str:
        """What choosing cost: settings x seeds x rounds; of a ladder settings/finalists/sum of rounds."""
        if self.finalists is None:
            return f"{self.count}x{self.seeds}x{self.rounds}"
        return f"{self.count}/{self.finalists}/{self.spent}"

    @property
    def validation(self) -> float | None:
        """Best value of the winner on held-out samples, mean over seeds, also for a choice by test."""
        known = _known([result.validation for result in self.results])
        return statistics.fmean(known) if known else None

    def with_grid_ends(self, axes: Mapping[str, Range | Categorical]) -> Choice:
        """Return the choice with the keys whose best value is the smallest or largest that the grid ``axes`` tries."""
        ends = []
        for key, axis in axes.items():
            name = next((k for k in (key, key.rpartition(".")[2]) if k in (self.settings or {})), None)
            numbers = [v for v in getattr(axis, "values", ()) if type(v) in (int, float)]
            if name and len(numbers) > 1 and (self.settings or {})[name] in (min(numbers), max(numbers)):
                ends.append(name)
        return dataclasses.replace(self, grid_ends=ends)

    @property
    def notes(self) -> list[str]:
        """What a reader must know: settings that could not be chosen, seeds that scatter, a value at a grid's end."""
        counts = {"diverged": self.diverged, "failed": self.failed, "missing": self.missing}
        notes = [f"{count} {status}" for status, count in counts.items() if count]
        notes += ["seeds scatter"] if self.scatters else []
        return notes + ([f"{', '.join(self.grid_ends)} at grid end"] if self.grid_ends else [])

    @property
    def scatters(self) -> bool:
        """Whether the seeds of the winner are far apart."""
        return self.metric.percent and self.spread is not None and self.spread > SCATTER

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON, with the keys of the winner's runs."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "results"}
        values |= {"metric": self.metric.as_dict(), "validation": self.validation, "count": self.count}
        of_metric = ("test", "last10", "validation")  # their names go with that of the metric: test_accuracy
        named = {f"{name}_{self.metric.name}" if name in of_metric else name: value for name, value in values.items()}
        return {**named, "runs": [result.key for result in self.results]}


def choose(
    results: Sequence[RunResult],
    by: str = "validation",
    over: Sequence[str] | None = None,
    *,
    finalist: Callable[[RunResult], bool] | None = None,
) -> list[Choice]:
    """Return the winner for every method and problem, in the order of their first appearance.

    Settings are compared by the mean over seeds of the primary metric's best value on ``by``. Only settings of which
    every seed ran to its end count: one that diverges is never chosen. ``over`` are the keys that were tuned (``lr``,
    ``hyper.lam`` or just ``lam``), by default rates, batches, epochs and all hyper-parameters; other differences make
    another problem, with its own winner. With ``finalist``, the results are those of a ladder: only settings whose runs
    it accepts can win, the others are counted, and rounds make no other problem.
    """
    if by not in BY:
        raise unknown("way to choose", by, BY)
    tuned = None if over is None else {_key(name, results) for name in over}
    cells: dict[tuple[str, str], dict[str, list[RunResult]]] = {}
    parts: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for result in results:
        problem, own = parts[id(result)] = _split(settings(result.spec.config), tuned)
        if finalist is not None:
            problem.pop("rounds", None)
        cell = cells.setdefault((result.spec.config.method, _text(problem)), {})
        cell.setdefault(_text(own), []).append(result)
    chosen = []
    for (method, _), groups in cells.items():
        problem, _ = parts[id(next(iter(groups.values()))[0])]
        others = [parts[id(o)][0] for o in results if o.spec.config.method == method]
        apart = {name: value for name, value in problem.items() if _differs(others, name)}
        chosen.append(_winner(method, by, apart, [(parts[id(g[0])][1], g) for g in groups.values()], finalist))
    return chosen


def _winner(
    method: str,
    by: str,
    problem: dict[str, Any],
    groups: list[tuple[dict[str, Any], list[RunResult]]],
    finalist: Callable[[RunResult], bool] | None,
) -> Choice:
    last = [finalist is None or all(map(finalist, group)) for _, group in groups]
    seeds = max(len({o.spec.config.seed for o in group}) for _, group in groups)
    # What did not reach the last rung of a ladder ran with the first seed alone.
    ends = [_end(group, seeds if final else 1) for (_, group), final in zip(groups, last, strict=True)]
    able = [
        (own, group, scores)
        for (own, group), end, final in zip(groups, ends, last, strict=True)
        if final and end == "done" and (scores := _known([o.score(by) for o in group])) is not None
    ]
    metric = shared_metric(result for _, group in groups for result in group)
    own, best, scores = metric.pick(able, lambda entry: statistics.fmean(entry[2])) or (None, [], [])
    worth = _known([o.validated if by == "validation" else o.best for o in best])
    rounds = _known([o.validation_round if by == "validation" else o.best_round for o in best])
    last10 = _known([o.last10 for o in best])
    return Choice(
        method=method,
        by=by,
        problem=problem,
        settings=None if own is None else _varied(own, [mine for mine, _ in groups]),
        metric=metric,
        score=statistics.fmean(scores) if scores else None,
        spread=statistics.stdev(scores) if len(scores) > 1 else None,
        test=statistics.fmean(worth) if worth else None,
        test_spread=statistics.stdev(worth) if worth and len(worth) > 1 else None,
        last10=statistics.fmean(last10) if last10 else None,
        round=round(statistics.fmean(rounds)) if rounds else None,
        results=best,
        tried=ends.count("done"),
        diverged=ends.count("diverged"),
        failed=ends.count("failed"),
        missing=ends.count("missing"),
        seeds=seeds,
        rounds=max(o.spec.config.rounds for _, group in groups for o in group),
        finalists=None if finalist is None else sum(last),
        spent=sum(o.rounds for _, group in groups for o in group),
    )


def _end(group: Sequence[RunResult], seeds: int) -> str:
    """Return the worst status of a setting's seeds; a seed that was not asked for is missing."""
    statuses = {result.status for result in group}
    if len({result.spec.config.seed for result in group}) < seeds:
        statuses.add("missing")
    return next(status for status in ("failed", "missing", "diverged", "done") if status in statuses)


def _split(values: dict[str, Any], tuned: set[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into those of the problem and those that are tuned."""
    if tuned is None:
        tuned = {key for key in values if key.partition(".")[0] in (*TUNED_KEYS, "hyper")}
    own = {k: v for k, v in values.items() if k in tuned}
    return {k: v for k, v in values.items() if k not in own}, own


def problem_of(config: Config) -> str:
    """Return what tells the problem of a configuration from others: all that is not tuned, as text."""
    return _text(_split(settings(config), None)[0])


def _varied(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that were not the same in all trials, by the short names of hyper-parameters."""
    return {k.removeprefix("hyper."): v for k, v in own.items() if _differs(others, k)}


def _differs(tables: Sequence[dict[str, Any]], name: str) -> bool:
    return len({_text(table.get(name)) for table in tables}) > 1


def _key(name: str, results: Sequence[RunResult]) -> str:
    """Return the full name of a key: ``lam`` and ``feddpc.lam`` are ``hyper.lam``."""
    known = {key for result in results for key in settings(result.spec.config)} | set(TUNED_KEYS)
    for full in (name, f"hyper.{name}", f"hyper.{name.rpartition('.')[2]}"):
        if full in known:
            return full
    raise BadInputError(f"{name} is no key of these runs: the known keys are {', '.join(sorted(known))}")


def _known(values: Sequence[float | None]) -> list[float] | None:
    """Return the values if all are known."""
    return [v for v in values if v is not None] if values and None not in values else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def budget(settings: int, seeds: int, rounds: int) -> str:
    """Return the budget of a method in words.

    >>> budget(6, 1, 20)
    '6 settings x 1 seed x 20 rounds'
    """
    parts = (("setting", settings), ("seed", seeds), ("round", rounds))
    return " x ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in parts)
