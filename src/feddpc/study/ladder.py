"""A ladder for tuning: all settings run for a few rounds, the better ones for more, the best two to the end.

A run that climbs is one run that is continued, so a rung costs only the rounds that it adds. The rungs:

    every setting            50 rounds (an eighth of all, where that is less); those at chance drop out
    the rest                 a quarter of the rounds
    the best four per group  half of the rounds
    the best two             all rounds, over all seeds; until then with the first seed
    around                   the winner's neighbours, as the last rung: rates between those that were tried, the next
                             values of other keys, and beyond the ends of the grid; until none of them is better, or
                             three times

Settings that compete make up a group: one method on one problem. Every group has the same rungs and, as far as its
rate allows, begins with the same number of settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc.config import Config
from feddpc.errors import BadInputError, FeddpcError
from feddpc.study.folder import RunResult, shared_metric
from feddpc.study.plan import trial_score
from feddpc.study.setup_cache import dataset
from feddpc.study.space import RATE, rounded
from feddpc.study.spec import RunSpec
from feddpc.tasks.metrics import ACCURACY

#: Rounds of the first rung, at most.
FIRST = 50
#: How many settings per group begin the third and the last rung.
KEPT = (4, 2)
#: An accuracy below so many times that of guessing is at chance, with few classes one that is above guessing by less
#: than this share of what guessing gets wrong: 15 % of ten classes, 53 % of two.
CHANCE = (1.5, 1 / 18)
#: How far a neighbour beyond is, as a factor, at least if the grid is as wide as that.
STEP = 2.0
#: Between two rates that are farther apart than this factor, one more is tried.
GAP = 3.0
#: How often the neighbours of the winner are tried.
AROUND = 3


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting that climbs: what is tried, in which group, and a configuration whose rounds and seed are filled in."""

    group: str
    values: Mapping[str, Any]
    config: Config
    label: str

    def specs(self, rounds: int, seeds: Sequence[int]) -> list[RunSpec]:
        """Return the runs of one rung."""
        return [
            RunSpec(
                dataclasses.replace(self.config, rounds=rounds, seed=seed),
                f"{self.label} seed {seed}",
                dict(self.values),
                extendable=True,
            )
            for seed in seeds
        ]


#: Makes the trial of a group at some values; it raises if the values are not allowed.
MakeTrial = Callable[[str, Mapping[str, Any]], Trial]
#: Runs specs, or looks up their results, and returns these in the same order.
RunSpecs = Callable[[Sequence[RunSpec]], list[RunResult]]


#: Called with a run that will not be continued, so that its checkpoint can go.
Dropped = Callable[[RunSpec], None]


def keep_checkpoint(_: RunSpec) -> None:
    """Keep what a run has stored."""


@dataclass(frozen=True)
class Rung:
    """How long the trials of a rung run, with which seeds, and how many per group go on; None: all above chance."""

    rounds: int
    seeds: tuple[int, ...]
    kept: int | None


def rungs(rounds: int, seeds: Sequence[int]) -> list[Rung]:
    """Return the rungs of a ladder that ends after so many rounds.

    >>> [(rung.rounds, rung.seeds, rung.kept) for rung in rungs(400, (0, 1))]
    [(50, (0,), None), (100, (0,), 4), (200, (0,), 2), (400, (0, 1), 1)]
    """
    quarter, half, alone = math.ceil(rounds / 4), math.ceil(rounds / 2), tuple(seeds[:1])
    first = max(1, min(FIRST, quarter // 2))
    return [
        Rung(first, alone, None),
        Rung(quarter, alone, KEPT[0]),
        Rung(half, alone, KEPT[1]),
        Rung(rounds, tuple(seeds), 1),
    ]


def describe(rounds: int, seeds: Sequence[int]) -> str:
    """Return the rungs in words.

    >>> describe(400, (0, 1))
    'ladder, in rounds: all settings 50, those above chance 100, the best 4 per method 200, the best 2 400 over 2 seeds'
    """
    first, second, third, last = rungs(rounds, seeds)
    over = f" over {len(last.seeds)} seeds" if len(last.seeds) > 1 else ""
    return (
        f"ladder, in rounds: all settings {first.rounds}, those above chance {second.rounds}, the best {second.kept} "
        f"per method {third.rounds}, the best {third.kept} {last.rounds}{over}"
    )


@dataclass
class Climb:
    """How far the trials of a ladder got: the results of the highest rung of each, in the order of the trials."""

    trials: list[Trial]
    reached: dict[Trial, list[RunResult]] = field(default_factory=dict)
    finalists: list[Trial] = field(default_factory=list)  #: those that ran to the end
    at_chance: list[Trial] = field(default_factory=list)
    around: list[Trial] = field(default_factory=list)  #: neighbours of winners that ran to the end after them
    complete: bool = False  #: whether nothing is left to run

    @property
    def results(self) -> list[RunResult]:
        """The results of all trials."""
        return [result for trial in self.trials for result in self.reached.get(trial, [])]


def climb(
    trials: Sequence[Trial],
    rounds: int,
    seeds: Sequence[int],
    run: RunSpecs,
    make: MakeTrial,
    *,
    by: str = "validation",
    dropped: Dropped = keep_checkpoint,
) -> Climb:
    """Let ``trials`` climb; stop where runs are missing. ``dropped`` is called for runs that will not be continued."""
    state, alive = Climb(list(trials)), list(trials)
    for trial in alive:
        _check_extendable(trial, rungs(rounds, seeds))
    for rung in rungs(rounds, seeds):
        scores = _run_rung(state, alive, rung, run, by)
        if scores is None:
            return state
        if rung.rounds == rounds:
            state.finalists = alive
            break
        kept = _go_on(state, alive, scores, rung.kept)
        for trial in alive:
            for spec in trial.specs(rung.rounds, rung.seeds) if trial not in kept else ():
                dropped(spec)
        alive = kept
    state.complete = _look_around(state, rungs(rounds, seeds)[-1], run, make, by)
    for trial in state.finalists if state.complete else ():
        for spec in trial.specs(rounds, seeds):
            dropped(spec)
    return state


def _run_rung(
    state: Climb, alive: Sequence[Trial], rung: Rung, run: RunSpecs, by: str
) -> dict[Trial, float | None] | None:
    """Run one rung and return the score of every trial; None if runs are missing."""
    specs = {trial: trial.specs(rung.rounds, rung.seeds) for trial in alive}
    results = iter(run([spec for mine in specs.values() for spec in mine]))
    for trial, mine in specs.items():
        state.reached[trial] = [next(results) for _ in mine]
    if any(result.status == "missing" for trial in alive for result in state.reached[trial]):
        return None
    return {trial: trial_score(state.reached[trial], by) for trial in alive}


def _go_on(state: Climb, alive: Sequence[Trial], scores: Mapping[Trial, float | None], kept: int | None) -> list[Trial]:
    """Return the trials that climb to the next rung, in their order: ``kept`` per group, or all above chance."""
    going: set[Trial] = set()
    for group in dict.fromkeys(trial.group for trial in alive):
        own = [trial for trial in alive if trial.group == group and _able(state.reached[trial])]
        own.sort(key=lambda trial: -(scores[trial] or 0.0))  # stable: of equal ones the first
        if kept is None:
            low = [trial for trial in own if _at_chance(state.reached[trial], scores[trial])]
            state.at_chance += low
            # A group in which nothing has begun to learn keeps as many as begin the third rung.
            going |= set(own) - set(low) or set(own[: KEPT[0]])
        else:
            going |= set(own[:kept])
    return [trial for trial in alive if trial in going]


def _able(results: Sequence[RunResult]) -> bool:
    """Whether every run was done: what diverged or failed is never chosen."""
    return all(result.status == "done" for result in results)


def _at_chance(results: Sequence[RunResult], score: float | None) -> bool:
    """Whether an accuracy is hardly above that of guessing; of other metrics that is not known."""
    data = dataset(results[0].spec.config)
    guessed = 1 / data.classes if data.target == "classes" and shared_metric(results) == ACCURACY else 0.0
    times, share = CHANCE
    return score is not None and score < min(times * guessed, guessed + share * (1 - guessed))


def _look_around(state: Climb, last: Rung, run: RunSpecs, make: MakeTrial, by: str) -> bool:
    """Try the neighbours of the winners, and those of new winners; return whether all of them are there."""
    for _ in range(AROUND):
        more = [trial for group in _groups(state) for trial in _neighbours(state, group, make, by)]
        if not more:
            return True
        state.trials += [trial for trial in more if trial not in state.trials]
        state.around += more
        if _run_rung(state, more, last, run, by) is None:
            return False
        state.finalists = [*state.finalists, *more]
    return True


def _groups(state: Climb) -> list[str]:
    return list(dict.fromkeys(trial.group for trial in state.trials))


def winner(state: Climb, group: str, by: str) -> Trial | None:
    """Return the best finalist of a group by its mean over seeds; of equal ones the first. None if none can be."""
    able = [t for t in state.finalists if t.group == group and _able(state.reached[t])]
    scored = [(trial, score) for trial in able if (score := trial_score(state.reached[trial], by)) is not None]
    return max(scored, key=lambda entry: entry[1])[0] if scored else None


def _neighbours(state: Climb, group: str, make: MakeTrial, by: str) -> list[Trial]:
    """Return the trials next to the winner of a group that have not run to the end, as far as they are allowed."""
    best = winner(state, group, by)
    if best is None:
        return []
    own = [trial for trial in state.trials if trial.group == group]
    found: list[Trial] = []
    for key, value in best.values.items():
        tried = [t.values[key] for t in own if key in t.values and type(t.values[key]) in (int, float)]
        for candidates in next_to(tried, value, fill=key == RATE):
            for candidate in candidates:
                values = {**best.values, key: candidate}
                known = next((trial for trial in own if dict(trial.values) == values), None)
                trial = known or _allowed(make, group, values)
                if trial is not None:
                    found += [] if trial in state.finalists else [trial]
                    break
    return found


def _allowed(make: MakeTrial, group: str, values: Mapping[str, Any]) -> Trial | None:
    """Return the trial at some values; None if one is outside its domain."""
    try:
        trial = make(group, values)
        trial.specs(1, (0,))[0].complete  # noqa: B018 -- raises if a value is outside its domain
    except FeddpcError:
        return None
    return trial


def next_to(tried: Sequence[float], value: float, *, fill: bool) -> list[list[float]]:
    """Return what to try below and above a value: of each list the first that is allowed.

    That is the next value that was tried, with ``fill`` one between where the next is far away, and what lies beyond
    an end.

    >>> next_to([1.0, 0.1, 0.01], 0.1, fill=True), next_to([1.0, 0.1, 0.01], 1.0, fill=False)
    ([[0.0316], [0.316]], [[0.1], [10.0]])
    >>> next_to([16, 32], 32, fill=False)
    [[16], [64.0, 64]]
    """
    if type(value) not in (int, float):
        return []
    row = sorted({*tried, value})
    at = row.index(value)
    around = []
    for other in (*row[max(at - 1, 0) : at], *row[at + 1 : at + 2]):
        far = fill and value > 0 and other > 0 and not 1 / GAP < other / value < GAP
        around.append([rounded(math.sqrt(value * other), 3) if far else other])
    further = beyond(row, value)
    if all(type(other) is int for other in row):  # the key may take whole numbers only
        further += [whole for whole in map(round, further) if whole not in row]
    return around + ([further] if further else [])


def beyond(tried: Sequence[float], value: float) -> list[float]:
    """Return what to try beyond ``value`` if it is an end of what was tried: first the next of a geometric row.

    >>> beyond([1.0, 0.1, 0.01], 1.0), beyond([1.0, 0.1, 0.01], 0.1), beyond([0.0, 0.5], 0.0), beyond([0.5, 0.9], 0.9)
    ([10.0], [], [-0.5], [1.62, 0.98])
    """
    row = sorted(set(tried))
    if len(row) < 2 or value not in (row[0], row[-1]):
        return []
    inward = row[1:] if value == row[0] else row[-2::-1]
    if value <= 0 or inward[0] <= 0:
        return [rounded(2 * value - inward[0])]
    apart = (other for other in inward if other > 0 and not 1 / STEP < other / value < STEP)
    before = next(apart, inward[0])
    further = [rounded(value * value / before)]
    if inward[0] < value < 1:  # a share comes nearer to one
        further.append(rounded(1 - (1 - value) ** 2 / (1 - inward[0])))
    return further


def _check_extendable(trial: Trial, steps: Sequence[Rung]) -> None:
    """Raise if the number of rounds changes more than how long the run is, such as a schedule of the rates."""
    first, last = (trial.specs(rung.rounds, rung.seeds[:1])[0].decisive() for rung in (steps[0], steps[-1]))
    if different := [key for key in first if first[key] != last.get(key)]:
        raise BadInputError(
            f"ladder: {', '.join(different)} of {trial.label} depends on the number of rounds, so a short run is not "
            "the beginning of a longer one: give it a fixed length (lr_schedule.over=...), or leave out the ladder"
        )
