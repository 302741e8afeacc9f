"""A whole sweep: ask for settings, run them, tell how they did, until the budget is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from feddpc.study.choose import BY, Choice, choose
from feddpc.study.item import Item, check
from feddpc.study.outcome import Outcome
from feddpc.study.plan import SweepPlan, claim
from feddpc.study.scheduler import OnProgress, Progress, execute
from feddpc.study.store import Store

#: Runs items, or looks them up, and returns their outcomes in the same order.
Run = Callable[[Sequence[Item]], list[Outcome]]


def tune(plan: SweepPlan, folder: Path, *, on_progress: OnProgress | None = None, **how: Any) -> list[Outcome]:
    """Run the sweep ``plan`` in ``folder``, or what is left of it; ``how`` goes to :func:`~feddpc.study.execute`."""
    runs, before = sum(plan.budgets().values()) * len(plan.seeds), Progress(0, 0, 0, 0, 0, 0)
    last = before

    def tell(now: Progress) -> None:
        nonlocal last
        last = Progress(
            total=runs,
            ended=before.ended + now.ended,
            failed=before.failed + now.failed,
            running=now.running,
            rounds=before.rounds + now.rounds,
            all_rounds=runs * (now.all_rounds // now.total),
        )
        if on_progress is not None:
            on_progress(last)

    def run(items: Sequence[Item]) -> list[Outcome]:
        nonlocal before
        before = last
        check(items)
        claim(folder, plan)
        return execute(items, folder, on_progress=tell, **how)

    outcomes = follow(plan, run)
    Store(folder).write_results(outcomes, both(outcomes))
    return outcomes


def both(outcomes: Sequence[Outcome]) -> list[Choice]:
    """Return what validation data choose, where there are any, and what the test set chooses."""
    ways = [by for by in BY if by == "test" or any(o.validation_accuracy is not None for o in outcomes)]
    return [choice for by in ways for choice in choose(outcomes, by)]


def follow(plan: SweepPlan, run: Run) -> list[Outcome]:
    """Go through the trials of ``plan`` as they are asked for; a search that lacks an answer ends there."""
    searches, outcomes = plan.searches(), []
    while searches:
        asked = {method: search.ask() for method, search in searches.items()}
        trials = [(method, plan.items(method, settings)) for method, batch in asked.items() for settings in batch]
        if not trials:
            break
        answers = iter(run([item for _, items in trials for item in items]))
        done: dict[str, list[list[Outcome]]] = {method: [] for method in searches}
        for method, items in trials:
            done[method].append([next(answers) for _ in items])
        for method, batch in done.items():
            outcomes += [outcome for trial in batch for outcome in trial]
            searches[method].tell([plan.score(trial) for trial in batch])
        if any(o.status == "missing" for batch in done.values() for trial in batch for o in trial):
            break
    return outcomes


def gather(plan: SweepPlan, folders: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes of a sweep whose runs lie in several folders; the best that is known of each."""
    return follow(plan, lambda items: [_best(item, folders) for item in items])


def scan(folders: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes of all runs in some folders, whatever they were made for."""
    found: dict[str, Item] = {}
    for folder in folders:
        for item in Store(folder).found():
            found.setdefault(item.key, item)
    return [_best(item, folders) for item in found.values()]


def _best(item: Item, folders: Sequence[Path]) -> Outcome:
    outcomes = [Store(folder).read(item) for folder in folders]
    rank = ("done", "diverged", "failed", "missing")
    return min(outcomes, key=lambda o: (rank.index(o.status), -o.rounds))
