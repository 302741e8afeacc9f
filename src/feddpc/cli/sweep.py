"""``feddpc sweep``: try settings of several methods with one budget, and choose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.cli.commands import Command, CommandGroup
from feddpc.config import PER_RUN_KEYS
from feddpc.errors import BadInputError, RunFolderError, unknown
from feddpc.registry import short_name

if TYPE_CHECKING:
    from feddpc.study import Choice, RunResult, StudyPlan
    from feddpc.study.workers import Workers

app = typer.Typer(
    cls=CommandGroup, help="Try settings of several methods with one budget, and choose.", invoke_without_command=True
)

SEARCH = "Search"
#: How many missing runs are named.
NAMED = 10


@app.callback()
@flags.config_flags(without=PER_RUN_KEYS, defaults={"validation": "0.1"})
def sweep(
    context: typer.Context,
    given: dict[str, Any],
    methods: Annotated[str | None, flags.methods_flag("feddpc")] = None,
    config: flags.ConfigFile = None,
    grid: Annotated[
        list[str] | None, flags.flag(SEARCH, "Try all: lr=0.3,0.1 or feddpc.lam=0.5,1.", metavar="KEY=VALUES")
    ] = None,
    random: Annotated[
        list[str] | None,
        flags.flag(SEARCH, "Draw: lr=log:1e-4:1, lam=uniform:0:2, epochs=int:1:5, or a list.", metavar="KEY=RANGE"),
    ] = None,
    trials: Annotated[int | None, flags.flag(SEARCH, "Draws per method.", min=1)] = None,
    sampler: Annotated[
        str | None, flags.flag(SEARCH, "Optuna's: tpe, gp, cmaes, qmc or random. [default: plain draws]")
    ] = None,
    ladder: Annotated[
        bool,
        flags.flag(
            SEARCH,
            "Run all settings of --grid briefly, the better ones longer, the best two to the end and over all seeds, "
            "and look beyond the ends of the grid; what is cut off was worse so far.",
            "--ladder",
        ),
    ] = False,
    search_seed: Annotated[int | None, flags.flag(SEARCH, "Seed of the random draws. [default: 0]", min=0)] = None,
    select: Annotated[
        str | None,
        flags.flag(
            SEARCH,
            "The score that samplers maximize and that tables print in bold: validation or test. [default: validation]",
        ),
    ] = None,
    seeds: flags.Seeds = None,
    set_: flags.Set = None,
    processes: Annotated[
        int | None, flags.flag(flags.EXECUTION, "Processes of this machine, one thread each.", min=1)
    ] = None,
    at_once: flags.AtOnce = None,
    ranks: Annotated[
        int,
        flags.flag(
            flags.EXECUTION,
            "Processes of one machine that share each run; with --ray-gpus as many, each has one.",
            min=1,
        ),
    ] = 1,
    ray: Annotated[str | None, flags.flag(flags.EXECUTION, "A Ray cluster: auto, local or its address.")] = None,
    ray_gpus: Annotated[
        float, flags.flag(flags.EXECUTION, "GPUs per run on Ray; 0.25 lets four share one.", min=0.0)
    ] = 0.0,
    out: flags.Out = None,
    extend: Annotated[
        bool,
        flags.flag(
            flags.OUTPUT, "Add the given methods, seeds, grid values or trials to the sweep in --out.", "--extend"
        ),
    ] = False,
    checkpoint_seconds: flags.CheckpointSeconds = 5.0,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Try settings of several methods with one budget, and choose: on validation data, and on the test set.

    Runs that are in --out already are not run again, so the same command continues a sweep that was stopped.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from feddpc.report.display import Many
    from feddpc.runs.stop import Stop
    from feddpc.study import StudyPlan, run_sweep
    from feddpc.study.choose import BY
    from feddpc.study.plan import extend_stored, make_space

    if select is not None and select not in BY:
        raise unknown("way to choose", select, BY)
    out = flags.output_folder(out, "sweep")
    axes, asked = [*(grid or []), *(random or [])], ("sweep", out, methods, seeds, given, config, set_)
    names, numbers, overrides, before = flags.merge_study(*asked, default=["feddpc"], add=extend, axes=axes)
    objective = "validation" if overrides.values.setdefault("validation", 0.1) else "test"
    if before and not any((grid, random, trials, sampler, search_seed)):
        space = before.space
    else:
        space = make_space(grid or [], random or [], trials, sampler, search_seed or 0, None)
    ladder = ladder or (before is not None and before.ladder)
    if ladder and seeds is None and before is None and numbers == [0]:
        numbers = [0, 1]  # the winner is the best on average over two
    plan = StudyPlan(names, numbers, overrides, space, select or (before.objective if before else objective), ladder)
    plan = extend_stored(out, plan) if extend else plan
    usual = 1 if ranks > 1 else _usual_at_once(plan, given.get("device"))
    workers, stop = _workers(processes, ray, ray_gpus, at_once or usual, ranks), Stop()
    console = Console(stderr=as_json, soft_wrap=True)
    if not quiet:
        _announce(plan, out, console, extend)
    with stop.on_interrupt(), Many(console, "sweep", quiet=quiet) as progress:
        results = run_sweep(
            plan,
            out,
            extend=extend,
            workers=workers,
            on_progress=progress,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
        )
    _present(results, [out], plan, quiet, as_json)
    flags.exit_with([result.status for result in results], interrupted=stop.wanted)


@app.command(cls=Command)
def show(
    folders: Annotated[list[Path], typer.Argument(help="Folders of one sweep, perhaps from several machines.")],
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Show which runs exist or are missing, and rewrite the tables.

    The tables are those of the first folder.
    """
    from feddpc.study import gather, scan
    from feddpc.study.plan import differences, stored_plan
    from feddpc.study.sweep import write_tables

    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}: give one that `feddpc sweep` wrote")
    plans = [plan for folder in folders if (plan := stored_plan(folder, "sweep", [])) is not None]
    for other in plans[1:]:
        if different := differences(plans[0], other).values():
            raise RunFolderError(f"the folders hold different sweeps ({'; '.join(different)}): show them one by one")
    results = gather(plans[0], folders) if plans else scan(folders)
    if not results:
        raise RunFolderError(f"{folders[0]} holds no sweep: give a folder that `feddpc sweep` wrote")
    plan = plans[0] if plans else None
    if os.access(folders[0], os.W_OK):
        write_tables(folders[0], plan, results)
    _present(results, folders, plan, quiet, as_json)
    flags.exit_with([result.status for result in results])


def _workers(processes: int | None, ray: str | None, gpus: float, at_once: int, ranks: int) -> Workers:
    from feddpc.study import InProcess, Processes, RayWorkers

    if processes is not None and ray is not None:
        raise BadInputError("--processes and --ray: choose one of them")
    if gpus and ray is None:
        raise BadInputError("--ray-gpus is for --ray: say which cluster")
    if ray is not None:
        return RayWorkers(ray, gpus=gpus, cpus=float(ranks), at_once=at_once, ranks=ranks)
    if processes is None:
        return InProcess(at_once=at_once, ranks=ranks)
    return Processes(processes, at_once=at_once, ranks=ranks)


def _usual_at_once(plan: StudyPlan, device: str | None) -> int:
    """Return the default of --at-once: one, if some of the models may be large."""
    from feddpc.config import Config
    from feddpc.study.space import Categorical

    def all_of(key: str) -> list[Any]:
        axis = plan.space.axes.get(key) if plan.space else None
        default = plan.overrides.values.get(key, getattr(Config, key))
        return list(axis.values) if isinstance(axis, Categorical) else [default]

    device = device or plan.overrides.values.get("device")
    return min(flags.usual_at_once(device, str(d), str(m)) for d in all_of("data") for m in all_of("model"))


def _announce(plan: StudyPlan, out: Path, console: Any, extend: bool) -> None:
    """Print the budget of every method, and warn where they differ."""
    from feddpc.report.display import print_line
    from feddpc.study.choose import budget
    from feddpc.study.plan import refuse_another

    refuse_another(out, plan, extend=extend)
    budgets = plan.budgets()
    if plan.ladder:
        from feddpc.study.ladder import describe

        budgets = {name: len(mine) for name, mine in plan.ladder_settings().items()}
        print_line(console, describe(plan.rounds, plan.seeds))
    for name, count in budgets.items():
        words = f"{count} setting{'s' * (count != 1)}, then the neighbors of the best"
        words = words if plan.ladder else budget(count, len(plan.seeds), plan.rounds)
        print_line(console, f"{short_name(name)}: {words}")
    if len(set(budgets.values())) > 1:
        print_line(
            console,
            "warning: the methods have different budgets, which favors those that try more settings; --random with "
            "--trials gives all the same",
            style="yellow",
        )


def _present(results: list[RunResult], folders: list[Path], plan: StudyPlan | None, quiet: bool, as_json: bool) -> None:
    """Show what was chosen and what is missing."""
    from collections import Counter

    from feddpc.study.sweep import choose_both, unfinished_ladder

    choices, counts = choose_both(results, plan), Counter(result.status for result in results)
    missing = [result for result in results if not result.ended]
    if as_json:
        named = [{"key": r.key, "label": r.spec.name, "status": r.status, "message": r.message} for r in missing]
        value = {"table": [c.as_dict() for c in choices], "runs": dict(counts), "missing": named}
        typer.echo(json.dumps({**value, "folders": [str(folder) for folder in folders]}))
        return
    if quiet:
        return
    from rich.console import Console

    from feddpc.report.display import print_line
    from feddpc.report.table import sweep_table

    console = Console(soft_wrap=True)
    print_line(console, ", ".join(f"{count} {status}" for status, count in counts.items()))
    for result in missing[:NAMED]:
        reason = f": {result.message}" if result.message else ""
        print_line(console, f"{result.status}: {result.spec.name}{reason}", style="yellow")
    if len(missing) > NAMED:
        print_line(console, f"and {len(missing) - NAMED} more", style="yellow")
    table = sweep_table(choices, plan.objective if plan else "validation")
    if unfinished_ladder(results, plan):
        print_line(console, "nothing can be chosen: the ladder is unfinished", style="yellow")
    console.print(table.rich())
    print_line(console, table.notes[0], style="dim")
    for warning in dict.fromkeys(_grid_end_warning(choice) for choice in choices if choice.grid_ends):
        print_line(console, warning, style="yellow")
    print_line(console, f"all runs: {folders[0] / 'results.csv'}")


def _grid_end_warning(choice: Choice) -> str:
    """Return a warning that the best value of a key is the smallest or largest of the grid."""
    values = ", ".join(f"{key} = {(choice.settings or {})[key]:g}" for key in choice.grid_ends)
    return f"warning: {short_name(choice.method)} is best at the end of its grid ({values}): --extend adds values"
