"""``feddpc federate``: a real federation over Flower, tried out on this machine and prepared for others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import federate_keys, federate_operate, flags
from feddpc.cli.commands import Command, CommandGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from feddpc.tasks.metrics import Metric

app = typer.Typer(cls=CommandGroup, help="Run a real federation over Flower.", no_args_is_help=True)


@app.command(cls=Command)
def demo(
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="SuperNodes. [default: the app's, 4]")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt, and let in only nodes with a registered key.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds. [default: the app's, 10]")] = None,
    method: Annotated[
        str | None, typer.Option(help="`feddpc methods` lists them. [default: the app's, feddpc]")
    ] = None,
    app_folder: Annotated[
        Path | None, typer.Option("--app", help="An app of yours, from `feddpc federate init`. [default: digits]")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of the SuperLink. [default: a free one]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for keys, logs and results. [default: runs/federate-TIME]")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Where the server app serves metrics: a port on loopback, or HOST:PORT.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo in --out.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, train, show the curve, and leave no process behind."""
    from rich.console import Console

    from feddpc.config import Config
    from feddpc.federate.demo import Demo
    from feddpc.report.display import Display, print_line

    folder = flags.output_folder(out, "federate", resume=resume)
    wanted = {"rounds": rounds, "method": method, "prometheus": prometheus}
    given = {key: value for key, value in wanted.items() if value is not None}
    federation = Demo(folder, nodes=nodes, tls=tls, app=app_folder, config=given, port=port, resume=resume)
    path, config = federation.prepare()
    console = Console(soft_wrap=True)

    def tell(line: str) -> None:
        if not quiet:
            print_line(console, line)

    plan = Config.read({key: config[key] for key in ("method", "rounds", "clients", "cohort", "seed")})
    try:
        with federation.stop.on_interrupt(), federation.start(path, config, tell) as records:
            tell(f"training: {plan.method}, {plan.rounds} rounds, {plan.cohort} of {plan.clients} nodes per round")
            with Display(console, quiet=quiet) as display:
                display.begin(plan)
                for record in records:
                    display.round(record)
    except KeyboardInterrupt:
        options = {"--nodes": nodes, "--rounds": rounds, "--method": method, "--app": app_folder, "--port": port}
        options |= {"--prometheus": prometheus, "--out": folder}
        parts = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
        print_line(console, f"continue: feddpc federate demo {shlex.join(['--tls'] * tls + parts)} --resume")
        raise
    _show(federation.run, folder, console, quiet)


@app.command(cls=Command)
def init(folder: Annotated[Path, typer.Argument(help="A new folder; it gives the app its name.")]) -> None:
    """Write a complete Flower app for your own model and data."""
    from feddpc.federate import app_template

    for path in app_template.write(folder):
        typer.echo(path)
    typer.echo(f"try it: feddpc federate demo --app {folder} --tls; change federation/task.py; README.md says the rest")


app.add_typer(federate_keys.app, name="keys")
app.command(cls=Command)(federate_operate.check)
app.command(cls=Command)(federate_operate.supervise)


def _show(run: Path, folder: Path, console: Console, quiet: bool) -> None:
    """Write curves and page, and show the rounds and the table."""
    from feddpc.report import page, tables
    from feddpc.report.display import print_line

    runs = tables.collect(run)
    failures: list[str] = []
    paths = page.write_all(runs, folder, failures=failures)
    flags.warn_of_failures(failures, folder)
    if quiet:
        return
    console.print(_curve(runs[0].records, runs[0].primary))
    console.print(tables.rich_table(tables.rows(runs)))
    for path in paths:
        if path.suffix != ".csv":
            print_line(console, f"{path.stem}: {path}")


def _curve(records: list[dict[str, Any]], metric: Metric, most: int = 20) -> Table:
    """Return the metric over rounds as a table with bars; at most ``most`` rounds, evenly spaced, with the last."""
    from rich.table import Table

    table = Table("round", "clients", metric.words + " %" * metric.percent, "", box=None, pad_edge=False)
    values = [record[metric.key()] for record in records]
    full = 1.0 if metric.percent else max((abs(value) for value in values if value is not None), default=1.0) or 1.0
    step = -(-len(records) // most)
    for record in records[::-1][::step][::-1]:
        value = record[metric.key()]
        who = ", ".join(map(str, record["participants"]))
        table.add_row(str(record["round"]), who, metric.text(value), "█" * round(40 * (value or 0.0) / full))
    return table
