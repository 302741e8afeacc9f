"""``feddpc run`` and ``feddpc compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.config import PER_RUN_KEYS, code_in
from feddpc.errors import BadInputError
from feddpc.registry import refuse_code, short_name

if TYPE_CHECKING:
    from feddpc.runs.rerun import RerunPlan
    from feddpc.runs.runner import Outcome
    from feddpc.study.overrides import Overrides

#: The seven of the paper's table, FedAvg included.
PAPER = "feddpc,fedavg,fedprox,fedexp,fedga,fedcm,fedvarp"


@flags.config_flags()
def run(
    given: dict[str, Any],
    config: flags.ConfigFile = None,
    like: flags.Like = None,
    set_: flags.Set = None,
    out: flags.Out = None,
    resume: flags.Resume = False,
    checkpoint_seconds: flags.CheckpointSeconds = 5.0,
    track: flags.Track = None,
    ranks: Annotated[
        int | None,
        flags.flag(flags.EXECUTION, "Processes of this machine that share the run; torchrun starts them too.", min=1),
    ] = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Train one model with one method."""
    from feddpc.ranks import join, place, restarted

    where = place()
    if ranks is not None and where is None:
        from feddpc.launch import launch

        raise typer.Exit(launch(ranks, [sys.executable, "-m", "feddpc", *sys.argv[1:]]))
    if where is not None and ranks not in (None, where.size):
        raise BadInputError(f"--ranks {ranks}, but {where.size} ranks were started: leave it out")
    if like is not None and resume:
        raise BadInputError("--like begins a new run: leave --resume out, or --like to continue what is in --out")
    if restarted() and out is not None and like is None:
        resume = resume or (out / "config.toml").is_file()
    out = flags.output_folder(out, "run", resume=resume)
    from feddpc.build import build
    from feddpc.config import Config
    from feddpc.resolve import resolve_device
    from feddpc.runs.record import load_config, resumed_config
    from feddpc.runs.resumable import check_resumable
    from feddpc.runs.runner import execute
    from feddpc.runs.stop import Stop
    from feddpc.unused import refuse_unused

    if resume:
        check_resumable(out, "run")
    stored = load_config(out) if resume else None
    table = flags.table(config)
    base = load_config(like) if like is not None else stored or Config()
    name = given.get("method", table.get("method", base.method))
    if not isinstance(name, str):
        raise BadInputError(f"method = {name!r}: must be one name; `feddpc compare` takes several")
    if like is not None or stored is not None:
        refuse_code(like or out, code_in({**base.asdict(), **table, **given}), code_in({**table, **given}))
    overrides = flags.merge(given, table, set_, [name])
    rerun = _rerun(like, overrides, name, quiet) if like is not None else None
    overrides.values.setdefault("threads", "auto")
    if rerun is not None:
        wanted = rerun.config
    elif stored is not None:
        wanted = resumed_config(out, overrides.values | {"hyper": overrides.hyper.get(name, {})})
    else:
        wanted = overrides.config(name)
    together = join(resolve_device(wanted.device), wanted.rank_timeout)
    out = together.gather(out)[0]  # the name of a new folder holds the time
    display, stop = _display(quiet or together.rank > 0, as_json), Stop()
    with together.together("preparing data, model and clients"):
        experiment = build(wanted)
        if stored is None:
            refuse_unused([(overrides.values, experiment.config)])
    with stop.on_interrupt(), display:
        outcome = execute(
            experiment,
            out=out,
            resume=resume,
            listener=display,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
            track=track or (),
            examine=rerun.examine if rerun else None,
            last_use=True,
        )
    likeness = rerun.compare(outcome.records) if rerun else None
    if together.rank:
        flags.exit_with([outcome.status], interrupted=stop.wanted)
        return
    _present([outcome], out, quiet, as_json, single=True, more={"like": likeness.asdict()} if likeness else {})
    if likeness and not (quiet or as_json):
        typer.echo(str(likeness))
    flags.exit_with([outcome.status], interrupted=stop.wanted)


@flags.config_flags(without=PER_RUN_KEYS)
def compare(
    given: dict[str, Any],
    methods: Annotated[str | None, flags.methods_flag(PAPER)] = None,
    seeds: flags.Seeds = None,
    config: flags.ConfigFile = None,
    set_: flags.Set = None,
    out: flags.Out = None,
    resume: flags.Resume = False,
    extend: Annotated[
        bool,
        flags.flag(flags.OUTPUT, "Continue what is in --out with the given methods and seeds added.", "--extend"),
    ] = False,
    checkpoint_seconds: flags.CheckpointSeconds = 5.0,
    at_once: Annotated[
        int,
        flags.flag(
            flags.EXECUTION,
            "Runs at a time, for a GPU that small models leave idle; each then takes longer than alone.",
            min=1,
        ),
    ] = 1,
    track: flags.Track = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Train with several methods and seeds on the same partition, initial model, participants and batches."""
    resume = resume or extend
    out = flags.output_folder(out, "compare", resume=resume)
    from feddpc.runs.resumable import check_resumable
    from feddpc.runs.stop import Stop
    from feddpc.study.compare import compare as run_comparison

    if resume:
        check_resumable(out, "comparison")
    asked = ("comparison", out, methods, seeds, given, config, set_)
    names, numbers, overrides, _ = flags.merge_study(*asked, default=PAPER.split(","), add=True, resume=resume)
    display, stop = _display(quiet, as_json), Stop()
    with stop.on_interrupt(), display:
        outcomes = run_comparison(
            overrides,
            names,
            numbers,
            out,
            resume=resume,
            extend=extend,
            listener=display,
            stop=stop,
            at_once=at_once,
            checkpoint_seconds=checkpoint_seconds,
            track=track or (),
        )
    _present(outcomes, out, quiet, as_json)
    flags.exit_with([o.status for o in outcomes], interrupted=stop.wanted)


def _rerun(like: Path, overrides: Overrides, method: str, quiet: bool) -> RerunPlan:
    """Return the plan to repeat the run in ``like``, with the changes that flags and file ask for."""
    from feddpc.runs.rerun import RerunPlan

    def tell(text: str) -> None:
        if not quiet:
            typer.echo(f"warning: {text}", err=True)

    given = {**overrides.values, "method": method, "hyper": overrides.hyper.get(method, {})}
    plan = RerunPlan.plan(like, given, tell)
    plan.refuse_missing(data=False, model=False, partition=False)
    return plan


def _display(quiet: bool, as_json: bool) -> Any:
    from rich.console import Console

    from feddpc.report.display import Display

    return Display(Console(stderr=as_json), quiet=quiet)


def _present(
    outcomes: list[Outcome],
    out: Path,
    quiet: bool,
    as_json: bool,
    *,
    single: bool = False,
    more: dict[str, Any] | None = None,
) -> None:
    """Write pictures, table and page, and show them."""
    from feddpc.report import page, tables

    failures: list[str] = []
    _picture(outcomes[0], out / "partition.png", failures)
    summaries = [outcome.summary for outcome in outcomes]
    damage: list[str] = []
    runs = tables.collect(out, damage)
    rows = tables.rows(runs)
    paths = page.write_all(runs, out, notes=damage, failures=failures)
    flags.warn_of_failures(failures, out)
    if as_json:
        value: dict[str, Any] = summaries[0] if single else {"runs": summaries, "table": tables.as_dicts(rows)}
        typer.echo(json.dumps({**value, "folder": str(out), **(more or {})}))
    elif not quiet:
        from rich.console import Console

        from feddpc.report.display import print_line

        console = Console(soft_wrap=True)
        console.print(tables.rich_table(rows))
        for path in paths:
            if path.suffix in (".png", ".html"):
                kind = "page" if path.suffix == ".html" else "curves"
                print_line(console, f"{kind}: {path}")


def _picture(outcome: Outcome, path: Path, failures: list[str]) -> None:
    """Draw the partition of the first run, once, for the page; there is no picture of clients without classes."""
    config, partition, data = outcome.config, outcome.experiment.partition, outcome.experiment.data
    if path.exists() or len(partition) > 10_000 or data.target != "classes":
        return
    from feddpc.report.failures import noted
    from feddpc.storage import explain_os_errors

    title = f"{short_name(config.data)}: {short_name(config.partition)}, {config.clients} clients, seed {config.seed}"
    with noted(path, failures), explain_os_errors(path):
        from feddpc.report import partition_picture

        partition_picture.draw(partition.counts(data.y_train, data.classes), path, data.class_names, title)
