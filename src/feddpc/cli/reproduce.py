"""``feddpc reproduce``: the paper's tables and figures, run again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.cli.commands import Command, CommandGroup
from feddpc.errors import BadInputError, RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from feddpc.paper.reproduction import Report
    from feddpc.report.table import Table
    from feddpc.study.workers import Workers

app = typer.Typer(
    cls=CommandGroup, help="The paper's tables and figures, run again, next to what it reports.", no_args_is_help=True
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


def _option(help: str, *names: str, panel: str = flags.EXPERIMENT, **facts: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **facts)


@flags.config_flags("rounds", "device", "engine", "precision", defaults={"rounds": "those of the scale"})
def reproduce(
    context: typer.Context,
    given: dict[str, Any],
    data: Annotated[
        str | None,
        _option("cifar10, cifar100, tiny-imagenet or digits; several with commas. [default: the paper's]"),
    ] = None,
    alpha: Annotated[
        str | None, _option("Numbers with commas between them. [default: 0.2,0.6; 0.2 for figures 4 and 5]")
    ] = None,
    seeds: Annotated[str, _option("Numbers with commas between them.")] = "0,1,2,3,4",
    ladder: Annotated[
        bool,
        _option(
            "Tune first: all settings of the paper's grid climb a ladder (docs/sweeps.md); or use known settings.",
            "--ladder/--tuned",
        ),
    ] = False,
    select: Annotated[
        str, _option("Use the settings that were best on: validation (held out), or test, as in the paper.")
    ] = "validation",
    scale: Annotated[
        str | None,
        _option("paper, small or tiny: shortened versions, which say so. [default: paper; small for digits]"),
    ] = None,
    methods: Annotated[str | None, _option("Only these rows of Table 2, with commas. [default: all]")] = None,
    ladder_seeds: Annotated[str, _option("Seeds of the ladder's last rung; the first of them climbs alone.")] = "0,1",
    rates: Annotated[str | None, _option("Rates of the ladder. [default: the paper's grid]")] = None,
    values: Annotated[str | None, _option("Values of its second parameter. [default: the paper's grid]")] = None,
    processes: Annotated[
        int | None,
        _option(
            "Processes on this machine, one thread each. [default: this one; for digits one per core]",
            panel=flags.EXECUTION,
            min=1,
        ),
    ] = None,
    at_once: flags.AtOnce = None,
    out: Annotated[Path, _option("Folder for all results; finished runs are not repeated.", panel=flags.OUTPUT)] = Path(
        "runs/reproduce"
    ),
    report_only: Annotated[
        bool, _option("Run nothing: report the runs that exist.", "--report-only", panel=flags.OUTPUT)
    ] = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Run what is missing, then print tables and findings and write figures and a page."""
    from rich.console import Console

    from feddpc.paper import reproduction
    from feddpc.paper.presets import default_scale, preset
    from feddpc.paper.study_spec import PaperSpec, data_of
    from feddpc.report.display import Many
    from feddpc.runs.stop import Stop

    target = str(context.info_name)
    wanted = data_of(target, None if data is None else flags.listed(data, "--data"))
    chosen: dict[str, Any] = {
        "alphas": _numbers(alpha, "--alpha"),
        "seeds": tuple(flags.seed_numbers(seeds, None) or ()),
        "ladder_seeds": tuple(flags.seed_numbers(ladder_seeds, None) or ()),
        "select": select,
        "rows": None if methods is None else tuple(flags.listed(methods, "--methods")),
        "rates": _numbers(rates, "--rates"),
        "values": _numbers(values, "--values"),
        "changes": given,
    }
    chosen = {k: v for k, v in chosen.items() if v is not None}
    specs = [PaperSpec(name, scale or default_scale(name), **chosen) for name in wanted]
    if not report_only and target != "table1":
        reproduction.require_data(list(wanted))
    speak = not (quiet or as_json)
    costs: list[Table] = []
    for spec in specs if target in ("table1", "all") else ():
        costs += reproduction.write_table1(spec, reproduction.Folders.of(out, spec))
    for table in costs if speak else ():
        _show_table(table)
    stop, reports = Stop(), []
    with stop.on_interrupt():
        for spec in specs if target != "table1" else ():
            model = preset(spec.data, scale=spec.scale).model
            count = at_once or flags.usual_at_once(given.get("device"), spec.data, model)
            with Many(Console(stderr=True), spec.data, quiet=report_only or not speak) as progress:
                report = reproduction.reproduce(
                    spec,
                    wanted[spec.data],
                    reproduction.Folders.of(out, spec),
                    ladder=ladder,
                    report_only=report_only,
                    workers=_workers(spec.data, processes, count),
                    on_progress=progress,
                    stop=stop,
                )
            reports.append(report)
            if report.failures:
                remedy = f"the same `feddpc reproduce {target}` with --report-only draws them later"
                typer.echo(f"warning: {'; '.join(report.failures)}; the records are complete, {remedy}", err=True)
            if speak:
                _show(report)
            if stop.wanted:
                break
    if as_json:
        tables = [table.as_dict() for table in costs]
        typer.echo(json.dumps({"studies": [report.as_dict() for report in reports], "table1": tables}))
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


def _numbers(text: str | None, flag: str) -> tuple[float, ...] | None:
    """Read numbers with commas between them; None if the flag was not given."""
    try:
        return None if text is None else tuple(float(item) for item in flags.listed(text, flag))
    except ValueError:
        raise BadInputError(f"{flag} {text!r}: write numbers with commas between them") from None


def _workers(data: str, count: int | None, at_once: int) -> Workers:
    """Return who runs: by default this process, and for digits one process per core."""
    from feddpc.study import InProcess, Processes

    count = count or ((os.cpu_count() or 1) if data == "digits" else 1)
    return InProcess(at_once=at_once) if count == 1 else Processes(count, at_once=at_once)


def _show(report: Report) -> None:
    """Print the summary, tables and findings of a report, and what is missing."""
    from rich.padding import Padding
    from rich.text import Text

    for line in report.summary:
        _console().print(line, style="bold", highlight=False, markup=False)
    for table in report.tables:
        _show_table(table)
    console, findings = _console(), report.findings
    if findings:
        console.print(f"\nWhat holds, {report.study.title}", style="bold", highlight=False)
    for finding in findings:
        where = "" if finding.line is None else f" (paper.tex, line {finding.line})"
        console.print(f"{finding.verdict + ':':{INDENT}}{finding.claim}{where}", highlight=False, markup=False)
        console.print(Padding(Text(finding.numbers, style="dim"), (0, 0, 0, INDENT), expand=False))
    console.print()
    if report.left_out:
        rows = "; ".join(report.left_out)
        console.print(f"rows without a known setting are left out ({rows}): --ladder tunes them", style="yellow")
    for path in report.paths:
        console.print(str(path), highlight=False, markup=False)
    if report.missing:
        console.print(f"\n{len(report.missing)} runs are missing; the same command runs them:", style="yellow")
        for text in report.describe_missing()[:NAMED]:
            console.print(f"  {text}", highlight=False, markup=False)
        if len(report.missing) > NAMED:
            console.print(f"  and {len(report.missing) - NAMED} more")


def _show_table(table: Table) -> None:
    console = _console()
    console.print(f"\n{table.title}", style="bold", highlight=False, markup=False)
    console.print(table.rich())
    for note in table.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _console() -> Console:
    from rich.console import Console

    return Console(width=max(Console().width, WIDTH))
