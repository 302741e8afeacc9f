"""``feddpc reproduce``: the paper's tables and figures, run again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.cli.commands import Command, Group
from feddpc.errors import BadInputError, RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from feddpc.paper.results import Report
    from feddpc.paper.study_spec import StudySpec
    from feddpc.paper.verdicts import Finding
    from feddpc.report.table import Table
    from feddpc.study.workers import Workers

app = typer.Typer(
    cls=Group, help="The paper's tables and figures, run again, next to what it reports.", no_args_is_help=True
)

#: What `feddpc reproduce --help` says of each target.
TARGETS = {
    "table1": "Costs: counted while the methods run, next to the paper's formulas.",
    "table2": "Best accuracy of all methods, ours next to the paper's.",
    "figure1": "Curves of Table 2 on CIFAR-10.",
    "figure2": "Curves of Table 2 on CIFAR-100.",
    "figure3": "Curves of Table 2 on Tiny ImageNet.",
    "figure4": "Ablation: projection, scaling, both.",
    "figure5": "The study of lambda, and its control.",
    "all": "All of these.",
}
#: Exit code if runs are missing.
UNFINISHED = 3
#: Columns that the tables need: a folded table cannot be read.
WIDTH = 150
#: Where the text of a finding starts, after the verdict.
INDENT = 16
#: How many missing runs are named.
NAMED = 20


def reproduce(
    context: typer.Context,
    data: Annotated[
        str | None,
        typer.Option(
            help="cifar10, cifar100, tiny-imagenet or digits; several with commas. [default: the paper's]",
            rich_help_panel=flags.EXPERIMENT,
        ),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            help="Numbers with commas between them. [default: 0.2,0.6; 0.2 for figures 4 and 5]",
            rich_help_panel=flags.EXPERIMENT,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Numbers with commas between them.", rich_help_panel=flags.EXPERIMENT)
    ] = "0,1,2,3,4",
    grid: Annotated[
        bool,
        typer.Option(
            "--grid/--tuned",
            help="First the paper's whole grid, to find the best settings; or only those found before.",
            rich_help_panel=flags.EXPERIMENT,
        ),
    ] = False,
    select: Annotated[
        str,
        typer.Option(
            help="Use the settings that were best on: test, as in the paper, or validation (held out).",
            rich_help_panel=flags.EXPERIMENT,
        ),
    ] = "test",
    scale: Annotated[
        str | None,
        typer.Option(
            help="paper, small or tiny: shortened versions, which say so. [default: paper; small for digits]",
            rich_help_panel=flags.EXPERIMENT,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds, if not those of the scale.", rich_help_panel=flags.EXPERIMENT),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these rows of Table 2, with commas. [default: all]", rich_help_panel=flags.EXPERIMENT),
    ] = None,
    grid_seeds: Annotated[
        str, typer.Option(help="Seeds of the grid; the paper has one.", rich_help_panel=flags.EXPERIMENT)
    ] = "0",
    grid_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of the grid. [default: those of the table]", rich_help_panel=flags.EXPERIMENT),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Only these rates of the grid.", rich_help_panel=flags.EXPERIMENT)
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(help="Only these values of the grid's second parameter.", rich_help_panel=flags.EXPERIMENT),
    ] = None,
    device: flags.Device = None,
    engine: flags.Engine = None,
    precision: flags.Precision = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of this machine, one thread each. [default: this one; for digits one per core]",
            rich_help_panel=flags.TRAINING,
        ),
    ] = None,
    at_once: flags.AtOnce = None,
    out: Annotated[
        Path, typer.Option(help="Folder for all results; what is there is not run again.", rich_help_panel=flags.OUTPUT)
    ] = Path("runs/reproduce"),
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Run nothing: report what is there.", rich_help_panel=flags.OUTPUT),
    ] = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Run what is missing, then print tables and findings and write figures and a page."""
    from rich.console import Console

    from feddpc.cli.display import Many
    from feddpc.paper import results
    from feddpc.paper.presets import PRESETS
    from feddpc.paper.study_spec import StudySpec, data_of
    from feddpc.runs.runner import Stop

    target = str(context.info_name)
    wanted = data_of(target, None if data is None else flags.listed(data, "--data"))
    execution = {"device": device, "engine": engine, "precision": precision}
    given: dict[str, Any] = {
        "alphas": None if alpha is None else _numbers(alpha, "--alpha"),
        "seeds": tuple(flags.seed_numbers(seeds, None) or ()),
        "grid_seeds": tuple(flags.seed_numbers(grid_seeds, None) or ()),
        "grid_rounds": grid_rounds,
        "select": select,
        "rounds": rounds,
        "rows": None if methods is None else tuple(flags.listed(methods, "--methods")),
        "rates": None if rates is None else _numbers(rates, "--rates"),
        "values": None if values is None else _numbers(values, "--values"),
        "execution": {k: v for k, v in execution.items() if v is not None},
    }
    given = {k: v for k, v in given.items() if v is not None}
    specs = [StudySpec(name, scale or _usual(name), **given) for name in wanted]
    if not report_only and target != "table1":
        results.require_data(list(wanted))
    speak = not (quiet or as_json)
    costs = _table1(specs, out) if target in ("table1", "all") else []
    for table in costs if speak else ():
        _show_table(table)
    stop, reports = Stop(), []
    with stop.on_interrupt():
        for spec in specs if target != "table1" else ():
            with Many(Console(stderr=True), spec.data, quiet=report_only or not speak) as progress:
                model = PRESETS[spec.data](scale=spec.scale).model
                count = at_once or flags.usual_at_once(device, spec.data, model)
                options = results.RunOptions(report_only, _workers(spec.data, processes, count), progress, stop)
                folders = results.Folders.of(out, spec)
                reports.append(results.reproduce(spec, wanted[spec.data], folders, options, grid=grid))
            if reports[-1].failures:
                remedy = f"the same `feddpc reproduce {target}` with --report-only draws them later"
                typer.echo(f"warning: {'; '.join(reports[-1].failures)}; the records are complete, {remedy}", err=True)
            if speak:
                _show(reports[-1])
            if stop.wanted:
                break
    if as_json:
        typer.echo(json.dumps({"studies": [_as_dict(r) for r in reports], "table1": [t.as_dict() for t in costs]}))
    if stop.wanted:
        raise typer.Exit(130)
    if any(report.missing for report in reports):
        raise typer.Exit(UNFINISHED)


for _name, _help in TARGETS.items():
    app.command(_name, cls=Command, help=_help)(reproduce)


@app.command(cls=Command)
def export(
    folder: Annotated[Path, typer.Argument(help="A folder of results: OUT/DATA/SCALE.")],
    to: Annotated[Path, typer.Option(help="The file to write, e.g. results/cifar10.json.")],
) -> None:
    """Write the records of a study to one compact file, from which the documents can be made."""
    from feddpc.paper import records
    from feddpc.paper.study import all_runs

    path = folder / "records.json"
    if not path.is_file():
        below = sorted(p.parent for p in folder.glob("**/records.json"))
        hint = f"; there are {', '.join(map(str, below))}" if below else ""
        raise RunFolderError(f"{folder} holds no results of `feddpc reproduce`{hint}")
    records.write(records.read(path), to)
    typer.echo(f"{to}: {len(all_runs(records.read(to).rows))} runs, {to.stat().st_size / 1e6:.2f} MB")


@app.command(cls=Command)
def docs(
    files: Annotated[list[Path], typer.Argument(help="Files of records; those of one study are put together.")],
    to: Annotated[Path, typer.Option(help="The document to write.")] = Path("docs/reproduction.md"),
    images: Annotated[Path, typer.Option(help="Folder for its figures.")] = Path("docs/images/reproduction"),
) -> None:
    """Write the document of the reproduction again, from records alone."""
    from feddpc.paper import documents, records

    for path in documents.write(records.read_all(files), to, images):
        typer.echo(str(path))


def _usual(data: str) -> str:
    """Return the scale of a data set if none is asked for."""
    return "small" if data == "digits" else "paper"


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        return tuple(float(item) for item in flags.listed(text, flag))
    except ValueError:
        raise BadInputError(f"{flag} {text!r}: write numbers with commas between them") from None


def _workers(data: str, count: int | None, at_once: int) -> Workers:
    """Return who runs: by default this process, and for digits one process per core."""
    from feddpc.study import InProcess, Processes

    count = count or ((os.cpu_count() or 1) if data == "digits" else 1)
    return InProcess(at_once=at_once) if count == 1 else Processes(count, at_once=at_once)


def _table1(specs: Sequence[StudySpec], out: Path) -> list[Table]:
    """Write Table 1 of each data set, which needs neither runs nor data, and return all."""
    from feddpc.paper import costs
    from feddpc.paper.results import Folders
    from feddpc.storage import make_folder, replace_text

    tables = []
    for spec in specs:
        folder = Folders.of(out, spec).results
        make_folder(folder)
        for table in costs.table1(spec.data, spec.scale):
            replace_text(folder / f"{table.name}.csv", table.csv())
            tables.append(table)
    return tables


def _show(report: Report) -> None:
    """Print the tables and findings of a report, and what is missing."""
    from rich.padding import Padding
    from rich.text import Text

    for table in _tables(report):
        _show_table(table)
    console, judged = _console(), _findings(report)
    if judged:
        console.print(f"\nWhat holds, {report.study.title}", style="bold", highlight=False)
    for finding in judged:
        where = "" if finding.line is None else f" (paper.tex, line {finding.line})"
        console.print(f"{finding.verdict + ':':{INDENT}}{finding.claim}{where}", highlight=False, markup=False)
        console.print(Padding(Text(finding.numbers, style="dim"), (0, 0, 0, INDENT), expand=False))
    console.print()
    for path in report.paths:
        console.print(str(path), highlight=False, markup=False)
    if report.missing:
        console.print(f"\n{len(report.missing)} runs are missing; the same command runs them:", style="yellow")
        for text in _missing(report)[:NAMED]:
            console.print(f"  {text}", highlight=False, markup=False)
        if len(report.missing) > NAMED:
            console.print(f"  and {len(report.missing) - NAMED} more")


def _show_table(table: Table) -> None:
    console = _console()
    console.print(f"\n{table.title}", style="bold", highlight=False, markup=False)
    console.print(table.rich())
    for note in table.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "title": report.study.title,
        "tables": [table.as_dict() for table in _tables(report)],
        "findings": [dataclasses.asdict(finding) for finding in _findings(report)],
        "missing": _missing(report),
        "files": [str(path) for path in report.paths],
    }


def _tables(report: Report) -> list[Table]:
    from feddpc.paper import documents

    return [table for part in report.parts for table in documents.part_tables(report.study, part)]


def _findings(report: Report) -> list[Finding]:
    from feddpc.paper.claims import findings

    return [finding for finding in findings(report.study) if finding.part in report.parts]


def _missing(report: Report) -> list[str]:
    """Return the runs that have not ended, and why."""
    return [": ".join(filter(None, (r.spec.name, r.status, r.message))) for r in report.missing]


def _console() -> Console:
    from rich.console import Console

    return Console(width=max(Console().width, WIDTH))
