"""Which settings win, chosen on held-out training samples or, as the paper does, on the test set."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feddpc.errors import BadInputError, unknown
from feddpc.study.item import settings
from feddpc.study.outcome import Outcome

#: What one tunes unless told otherwise, beside the hyper-parameters. All else belongs to the problem.
TUNED = ("lr", "server_lr", "lr_decay", "batch_size", "epochs")
BY = ("validation", "test")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best settings of one method for one problem, and what choosing them cost.

    ``test_accuracy`` is what the choice is worth: for one on validation data the test accuracy of the round that these
    choose, for one on the test set the highest test accuracy of any round, which flatters.
    """

    method: str
    by: str  #: validation or test
    problem: dict[str, Any]  #: what sets the problem apart from the others here
    settings: dict[str, Any] | None  #: None where nothing can be chosen
    score: float | None  #: mean over seeds of what was maximised
    test_accuracy: float | None
    test_spread: float | None  #: sample standard deviation over seeds
    last10_accuracy: float | None
    round: int | None  #: mean of the seeds' chosen rounds
    outcomes: list[Outcome]  #: the runs of the winner, one a seed
    tried: int  #: settings that were run to their end with every seed
    diverged: int
    failed: int
    missing: int
    seeds: int
    rounds: int  #: of every run

    @property
    def count(self) -> int:
        """How many settings the method was given to try."""
        return self.tried + self.diverged + self.failed + self.missing

    @property
    def validation_accuracy(self) -> float | None:
        """Best accuracy of the winner on held-out samples, mean over seeds, however it was chosen."""
        found = _known([outcome.validation_accuracy for outcome in self.outcomes])
        return statistics.fmean(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON, with the keys of the winner's runs."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "outcomes"}
        more = {"validation_accuracy": self.validation_accuracy, "count": self.count}
        return {**values, **more, "runs": [outcome.key for outcome in self.outcomes]}


def choose(outcomes: Sequence[Outcome], by: str = "validation", over: Sequence[str] | None = None) -> list[Choice]:
    """Return the winner for every method and problem, in the order of their first appearance.

    Settings are compared by the mean over seeds of the best accuracy on ``by``. Only those count whose every seed was
    run to its end: one that diverges is not to be recommended, whatever it had reached. ``over`` are the keys that were
    tuned (``lr``, ``hyper.lam`` or just ``lam``), by default rates, batches, epochs and all hyper-parameters; what
    differs besides is another problem, with a winner of its own.
    """
    if by not in BY:
        raise unknown("way to choose", by, BY)
    tuned = None if over is None else {_key(name, outcomes) for name in over}
    cells: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    parts: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for outcome in outcomes:
        problem, own = parts[id(outcome)] = _split(settings(outcome.item.config), tuned)
        cell = cells.setdefault((outcome.item.config.method, _text(problem)), {})
        cell.setdefault(_text(own), []).append(outcome)
    chosen = []
    for (method, _), groups in cells.items():
        problem, _ = parts[id(next(iter(groups.values()))[0])]
        others = [parts[id(o)][0] for o in outcomes if o.item.config.method == method]
        apart = {name: value for name, value in problem.items() if _differs(others, name)}
        chosen.append(_winner(method, by, apart, [(parts[id(g[0])][1], g) for g in groups.values()]))
    return chosen


def _winner(
    method: str, by: str, problem: dict[str, Any], groups: list[tuple[dict[str, Any], list[Outcome]]]
) -> Choice:
    seeds = max(len({o.item.config.seed for o in group}) for _, group in groups)
    ends = [_end(group, seeds) for _, group in groups]
    able = [
        (own, group, scores)
        for (own, group), end in zip(groups, ends, strict=True)
        if end == "done" and (scores := _known([o.score(by) for o in group])) is not None
    ]
    own, best, scores = max(able, key=lambda entry: statistics.fmean(entry[2]), default=(None, [], []))
    worth = _known([o.validated_accuracy if by == "validation" else o.best_accuracy for o in best])
    rounds = _known([o.validation_round if by == "validation" else o.best_round for o in best])
    last10 = _known([o.last10_accuracy for o in best])
    return Choice(
        method=method,
        by=by,
        problem=problem,
        settings=None if own is None else _varied(own, [mine for mine, _ in groups]),
        score=statistics.fmean(scores) if scores else None,
        test_accuracy=statistics.fmean(worth) if worth else None,
        test_spread=statistics.stdev(worth) if worth and len(worth) > 1 else None,
        last10_accuracy=statistics.fmean(last10) if last10 else None,
        round=round(statistics.fmean(rounds)) if rounds else None,
        outcomes=best,
        tried=ends.count("done"),
        diverged=ends.count("diverged"),
        failed=ends.count("failed"),
        missing=ends.count("missing"),
        seeds=seeds,
        rounds=groups[0][1][0].item.config.rounds,
    )


def _end(group: Sequence[Outcome], seeds: int) -> str:
    """Return how the seeds of a setting ended, the worst of them; one that nobody has asked for is missing."""
    statuses = {outcome.status for outcome in group}
    if len({outcome.item.config.seed for outcome in group}) < seeds:
        statuses.add("missing")
    return next(status for status in ("failed", "missing", "diverged", "done") if status in statuses)


def _split(values: dict[str, Any], tuned: set[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part settings into those of the problem and those that are tuned."""
    own = {k: v for k, v in values.items() if (k in TUNED or k.startswith("hyper.") if tuned is None else k in tuned)}
    return {k: v for k, v in values.items() if k not in own}, own


def _varied(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that were not the same in all trials, by the short names of hyper-parameters."""
    return {k.removeprefix("hyper."): v for k, v in own.items() if _differs(others, k)}


def _differs(tables: Sequence[dict[str, Any]], name: str) -> bool:
    return len({_text(table.get(name)) for table in tables}) > 1


def _key(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return the full name of a key: ``lam`` and ``feddpc.lam`` are ``hyper.lam``."""
    known = {key for outcome in outcomes for key in settings(outcome.item.config)} | set(TUNED)
    for full in (name, f"hyper.{name}", f"hyper.{name.rpartition('.')[2]}"):
        if full in known:
            return full
    raise BadInputError(f"{name} is no key of these runs: known are {', '.join(sorted(known))}")


def _known(values: Sequence[float | None]) -> list[float] | None:
    """Return the values if all are known."""
    return [v for v in values if v is not None] if values and None not in values else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def budget(settings: int, seeds: int, rounds: int) -> str:
    """Say what a method is given.

    >>> budget(6, 1, 20)
    '6 settings x 1 seed x 20 rounds'
    """
    parts = (("setting", settings), ("seed", seeds), ("round", rounds))
    return " x ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in parts)
