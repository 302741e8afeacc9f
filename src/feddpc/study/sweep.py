"""A whole sweep: ask for settings, run them, report their scores, until the budget is spent; then choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddpc.study.choose import BY, Choice, choose, problem_of
from feddpc.study.folder import RunResult, StudyFolder
from feddpc.study.ladder import Climb, Dropped, RunSpecs, Trial, climb, keep_checkpoint
from feddpc.study.plan import FILES, StudyPlan, claim
from feddpc.study.runner import OnProgress, Progress, run_study
from feddpc.study.spec import RunSpec
from feddpc.unused import ENABLING, refuse_unused


def run_sweep(
    plan: StudyPlan, folder: Path, *, extend: bool = False, on_progress: OnProgress | None = None, **how: Any
) -> list[RunResult]:
    """Run the sweep ``plan`` in ``folder``, or what is left of it; ``how`` goes to :func:`~feddpc.study.run_study`.

    With ``extend``, ``plan`` may have more methods, seeds, grid values and trials than the one in ``folder``.
    """
    total, before = sum(plan.budgets().values()) * len(plan.seeds), Progress(0, 0, 0, 0, 0, 0)
    last = before

    def report(now: Progress) -> None:
        nonlocal last
        last = dataclasses.replace(
            now,
            total=max(total, before.ended + now.total),
            ended=before.ended + now.ended,
            failed=before.failed + now.failed,
            rounds=before.rounds + now.rounds,
            all_rounds=before.all_rounds + now.all_rounds if plan.ladder else total * (now.all_rounds // now.total),
        )
        if on_progress is not None:
            on_progress(last)

    def run(specs: Sequence[RunSpec]) -> list[RunResult]:
        nonlocal before
        before = last
        # This raises what is wrong with a setting before anything is written.
        given = [({**plan.overrides.values, **spec.tags}, spec.complete) for spec in specs]
        if not (folder / FILES["sweep"]).exists() and not plan.draws(ENABLING):
            refuse_unused(given)
        claim(folder, plan, extend=extend)
        return run_study(specs, folder, on_progress=report, **how)

    results = run_trials(plan, run, StudyFolder(folder).drop_checkpoint)
    write_tables(folder, plan, results)
    return results


def write_tables(folder: Path, plan: StudyPlan | None, results: Sequence[RunResult]) -> None:
    """Write the results of a sweep and what is chosen from them."""
    choices = [choice.as_dict() for choice in choose_both(results, plan)]
    StudyFolder(folder).write_results(results, choices)


def choose_both(results: Sequence[RunResult], plan: StudyPlan | None = None) -> list[Choice]:
    """Return what validation data choose, where there are any, and what the test set chooses.

    With the ``plan`` of a grid, every choice names the keys whose best value is at an end of the grid. From a ladder
    only settings that ran to the end can be chosen; they are counted among all that were tried.
    """
    if plan is not None and plan.ladder:
        return _choose_finalists(results, plan)
    ways = [by for by in BY if by == "test" or any(r.validation is not None for r in results)]
    axes = plan.space.axes if plan and plan.space and plan.space.trials is None else {}
    return [choice.with_grid_ends(axes) for by in ways for choice in choose(results, by)]


def unfinished_ladder(results: Sequence[RunResult], plan: StudyPlan | None) -> bool:
    """Whether runs of a ladder are missing, so that nothing can be chosen yet."""
    return plan is not None and plan.ladder and any(result.status == "missing" for result in results)


def _choose_finalists(results: Sequence[RunResult], plan: StudyPlan) -> list[Choice]:
    """Return what is chosen from the last rung of a ladder; a method without a finalist has its counts alone."""
    ways = [by for by in BY if by == "test" or any(r.validation is not None for r in results)]
    complete = not unfinished_ladder(results, plan)

    def finalist(result: RunResult) -> bool:
        return complete and result.spec.config.rounds == plan.rounds

    return [choice for by in ways for choice in choose(results, by, finalist=finalist)]


def climb_plan(plan: StudyPlan, run: RunSpecs, dropped: Dropped = keep_checkpoint) -> Climb:
    """Let the settings of a plan climb its ladder; every method on every problem is a group."""
    method_of: dict[str, str] = {}

    def make(group: str, settings: Mapping[str, Any]) -> Trial:
        method = method_of.get(group, group)
        spec = plan.specs(method, dict(settings))[0]
        group = f"{method} {problem_of(spec.config)}"
        method_of[group] = method
        return Trial(group, settings, spec.config, spec.label.partition(" seed ")[0])

    trials = [make(method, values) for method, mine in plan.ladder_settings().items() for values in mine]
    return climb(trials, plan.rounds, plan.seeds, run, make, by=plan.objective, dropped=dropped)


def run_trials(plan: StudyPlan, run: RunSpecs, dropped: Dropped = keep_checkpoint) -> list[RunResult]:
    """Run the trials of ``plan``; a search that lacks a score ends there.

    The results are in the order of the methods, and for each method in the order of its trials and seeds. A ladder
    says which of its runs will not be continued, and has the result of the highest rung of each trial.
    """
    if plan.ladder:
        return climb_plan(plan, run, dropped).results
    searches = plan.searches()
    results: dict[str, list[RunResult]] = {method: [] for method in searches}
    while True:
        asked = {method: search.ask() for method, search in searches.items()}
        trials = [(method, plan.specs(method, settings)) for method, batch in asked.items() for settings in batch]
        if not trials:
            break
        answers = iter(run([spec for _, specs in trials for spec in specs]))
        scores: dict[str, list[float | None]] = {method: [] for method in searches}
        missing = False
        for method, specs in trials:
            trial = [next(answers) for _ in specs]
            results[method] += trial
            scores[method].append(plan.score(trial))
            missing = missing or any(result.status == "missing" for result in trial)
        for method, search in searches.items():
            search.tell(scores[method])
        if missing:
            break
    return [result for mine in results.values() for result in mine]


def gather(plan: StudyPlan, folders: Sequence[Path]) -> list[RunResult]:
    """Return the results of a sweep whose runs are in several folders; of each run, the one that got furthest."""
    return run_trials(plan, lambda specs: [_best(spec, folders) for spec in specs])


def scan(folders: Sequence[Path]) -> list[RunResult]:
    """Return the results of all runs in some folders, without the plan of a sweep."""
    specs = {spec.key: spec for folder in reversed(folders) for spec in StudyFolder(folder).stored_specs()}
    return [_best(spec, folders) for spec in specs.values()]


def _best(spec: RunSpec, folders: Sequence[Path]) -> RunResult:
    results = [StudyFolder(folder).read(spec) for folder in folders]
    rank = ("done", "diverged", "failed", "missing")
    return min(results, key=lambda r: (rank.index(r.status), -r.rounds))
