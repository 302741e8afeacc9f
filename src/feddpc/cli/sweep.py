"""``feddpc sweep``: try settings of several methods with one budget, and choose."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.cli.commands import Command, Group
from feddpc.config import code_in, per_run_keys
from feddpc.errors import BadInputError, RunFolderError, unknown
from feddpc.registry import refuse_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feddpc.study import Outcome, SweepPlan
    from feddpc.study.workers import Workers

app = typer.Typer(
    cls=Group, help="Try settings of several methods with one budget, and choose.", invoke_without_command=True
)

SEARCH = "Search"
#: Exit code when some runs are not there: not begun, cut off, or failed.
UNFINISHED = 3
#: How many runs that are not there are named.
NAMED = 10


@app.callback()
@flags.config_flags(without=per_run_keys(), defaults={"validation": "0.1"})
def sweep(
    context: typer.Context,
    given: dict[str, Any],
    methods: Annotated[
        str | None,
        typer.Option(help="Names with commas between them, or all. [default: feddpc]", rich_help_panel="Method"),
    ] = None,
    config: flags.ConfigFile = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Try all: lr=0.3,0.1 or feddpc.lam=0.5,1.", rich_help_panel=SEARCH),
    ] = None,
    random: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="Draw: lr=log:1e-4:1, lam=uniform:0:2, epochs=int:1:5, or a list.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Draws for each method.", rich_help_panel=SEARCH)] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="Optuna's: tpe, gp, cmaes, qmc or random. [default: plain draws]", rich_help_panel=SEARCH),
    ] = None,
    search_seed: Annotated[
        int | None, typer.Option(min=0, help="Of the draws. [default: 0]", rich_help_panel=SEARCH)
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="What a sampler maximises and what is marked: validation or test. [default: validation]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    seeds: flags.Seeds = None,
    set_: flags.Set = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of this machine, a thread each.", rich_help_panel=flags.EXECUTION),
    ] = None,
    at_once: flags.AtOnce = None,
    ray: Annotated[
        str | None,
        typer.Option(help="A Ray cluster: auto, local or its address.", rich_help_panel=flags.EXECUTION),
    ] = None,
    ray_gpus: Annotated[
        float,
        typer.Option(min=0.0, help="GPUs of a run on Ray; 0.25 lets four share one.", rich_help_panel=flags.EXECUTION),
    ] = 0.0,
    out: flags.Out = None,
    checkpoint_seconds: flags.CheckpointSeconds = 5.0,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Try settings of several methods with one budget, and choose: on validation data, and on the test set.

    What is in --out already is not run again, so the same command continues a sweep that was stopped at any moment.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from feddpc.cli.display import Many
    from feddpc.runs.runner import Stop
    from feddpc.study import tune

    out = out or Path("runs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    vary = {"grid": grid, "random": random, "trials": trials, "sampler": sampler, "seed": search_seed}
    plan = _plan(out, methods, seeds, given, flags.table(config), set_, vary, select)
    workers, stop = _workers(processes, ray, ray_gpus, at_once or _usual_at_once(plan, given.get("device"))), Stop()
    console = Console(stderr=as_json, soft_wrap=True)
    if not quiet:
        _announce(plan, out, console)
    with stop.on_interrupt(), Many(console, "sweep", quiet=quiet) as progress:
        outcomes = tune(
            plan, out, workers=workers, on_progress=progress, stop=stop, checkpoint_seconds=checkpoint_seconds
        )
    _present(outcomes, [out], plan.objective, quiet, as_json)
    if stop.wanted:
        raise typer.Exit(130)
    _exit(outcomes)


@app.command(cls=Command)
def show(
    folders: Annotated[list[Path], typer.Argument(help="Folders of one sweep, perhaps from several machines.")],
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Say what is there and what is missing, and write results.csv of the first folder anew."""
    from feddpc.study import gather, scan
    from feddpc.study.plan import differences, stored
    from feddpc.study.store import Store
    from feddpc.study.tune import both

    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}: give one that `feddpc sweep` wrote")
    plans = [plan for folder in folders if (plan := stored(folder)) is not None]
    for other in plans[1:]:
        if different := differences(plans[0], other):
            raise RunFolderError(f"the folders hold different sweeps ({'; '.join(different)}): show them one by one")
    for plan in plans:  # `feddpc report` reads the runs without their code
        refuse_code(folders[0], [*plan.methods, *code_in(plan.wishes.values)], [])
    outcomes = gather(plans[0], folders) if plans else scan(folders)
    if not outcomes:
        raise RunFolderError(f"{folders[0]} holds no sweep: give a folder that `feddpc sweep` wrote")
    if os.access(folders[0], os.W_OK):
        Store(folders[0]).write_results(outcomes, both(outcomes))
    _present(outcomes, folders, plans[0].objective if plans else "validation", quiet, as_json)
    _exit(outcomes)


def _plan(
    out: Path,
    methods: str | None,
    seeds: str | None,
    given: dict[str, Any],
    table: dict[str, Any],
    sets: Sequence[str] | None,
    vary: dict[str, Any],
    select: str | None,
) -> SweepPlan:
    """Return what was asked for; where a sweep is in ``out``, what is not said is as there."""
    from feddpc.study.choose import BY
    from feddpc.study.plan import SweepPlan, make_space, stored

    if select is not None and select not in BY:
        raise unknown("way to choose", select, BY)
    before = stored(out)
    asked = flags.method_names(methods, table.get("methods"))
    if before:
        named = {**table, **given}
        code = [*([] if asked else before.methods), *code_in({**before.wishes.values, **named})]
        refuse_code(out, code, code_in(named))
    names = asked or (list(before.methods) if before else ["feddpc"])
    numbers = flags.seed_numbers(seeds, table.get("seeds")) or (list(before.seeds) if before else [0])
    base = before.wishes if before else None
    wishes = flags.wishes(given, table, sets, names, extra=["methods", "seeds"], base=base)
    wishes.values.setdefault("threads", "auto")
    wishes.values.setdefault("validation", 0.1)
    if before and not any(vary.values()):
        space = before.space
    else:
        space = make_space(
            vary["grid"] or [], vary["random"] or [], vary["trials"], vary["sampler"], vary["seed"] or 0, None
        )
    judged = "validation" if wishes.values["validation"] else "test"
    return SweepPlan(names, numbers, wishes, space, select or (before.objective if before else judged))


def _workers(processes: int | None, ray: str | None, gpus: float, at_once: int) -> Workers:
    from feddpc.study import InProcess, Processes, RayWorkers

    if processes is not None and ray is not None:
        raise BadInputError("--processes and --ray: choose one of them")
    if gpus and ray is None:
        raise BadInputError("--ray-gpus is for --ray: say which cluster")
    if ray is not None:
        return RayWorkers(ray, gpus=gpus, at_once=at_once)
    return InProcess(at_once=at_once) if processes is None else Processes(processes, at_once=at_once)


def _usual_at_once(plan: SweepPlan, device: str | None) -> int:
    """Return how many runs share a process if nobody says; one, if some of the models may be large."""
    from feddpc.config import Config
    from feddpc.study.ranges import Choice

    def all_of(key: str) -> list[Any]:
        axis = plan.space.axes.get(key)
        return list(axis.values) if isinstance(axis, Choice) else [plan.wishes.values.get(key, getattr(Config, key))]

    device = device or plan.wishes.values.get("device")
    return min(flags.usual_at_once(device, str(d), str(m)) for d in all_of("data") for m in all_of("model"))


def _announce(plan: SweepPlan, out: Path, console: Any) -> None:
    """Print what every method is given, and warn where that is not the same."""
    from feddpc.config import Config
    from feddpc.study.choose import budget
    from feddpc.study.plan import refuse_another

    refuse_another(out, plan)

    budgets, rounds = plan.budgets(), plan.wishes.values.get("rounds", Config.rounds)
    for name, count in budgets.items():
        console.print(f"{name}: {budget(count, len(plan.seeds), rounds)}", highlight=False, markup=False)
    if len(set(budgets.values())) > 1:
        console.print(
            "warning: the methods have different budgets, so the one that tries more is favoured; --random with "
            "--trials gives all the same",
            style="yellow",
            highlight=False,
        )


def _present(outcomes: list[Outcome], folders: list[Path], select: str, quiet: bool, as_json: bool) -> None:
    """Show what was chosen and what is missing."""
    from collections import Counter

    from feddpc.study.tune import both

    choices, counts = both(outcomes), Counter(outcome.status for outcome in outcomes)
    open_ = [outcome for outcome in outcomes if not outcome.ended]
    if as_json:
        lacking = [{"key": o.key, "label": o.item.name, "status": o.status, "message": o.message} for o in open_]
        found = {"table": [c.as_dict() for c in choices], "runs": dict(counts), "missing": lacking}
        typer.echo(json.dumps({**found, "folders": [str(folder) for folder in folders]}))
        return
    if quiet:
        return
    from rich.console import Console

    from feddpc.report import choices as table

    console = Console(soft_wrap=True)
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), highlight=False)
    for outcome in open_[:NAMED]:
        said = f": {outcome.message}" if outcome.message else ""
        console.print(f"{outcome.status}: {outcome.item.name}{said}", style="yellow", highlight=False, markup=False)
    if len(open_) > NAMED:
        console.print(f"and {len(open_) - NAMED} more", style="yellow", highlight=False)
    console.print(table.rich_table(choices, select))
    console.print(table.LEGEND, style="dim", highlight=False)
    console.print(f"all runs: {folders[0] / 'results.csv'}", highlight=False, markup=False)


def _exit(outcomes: Sequence[Outcome]) -> None:
    if any(not outcome.ended for outcome in outcomes):
        raise typer.Exit(UNFINISHED)
    if all(outcome.status == "diverged" for outcome in outcomes):
        raise typer.Exit(1)
