"""``feddpc federate``: a real federation over Flower, tried out on this machine and prepared for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.cli.commands import Command, Group

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

app = typer.Typer(cls=Group, help="Run a real federation over Flower.", no_args_is_help=True)


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
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo in --out.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, train, show the curve, and leave no process behind."""
    from rich.console import Console

    from feddpc.cli.display import Display
    from feddpc.config import Config
    from feddpc.errors import BadInputError
    from feddpc.federate.demo import Demo

    if resume and out is None:
        raise BadInputError("--resume needs --out FOLDER, the folder to continue")
    folder = out or Path("runs") / f"federate-{time.strftime('%Y%m%d-%H%M%S')}"
    given = {key: value for key, value in {"rounds": rounds, "method": method}.items() if value is not None}
    wanted = Demo(folder, nodes=nodes, tls=tls, app=app_folder, config=given, port=port, resume=resume)
    path, config = wanted.prepare()
    console = Console(soft_wrap=True)

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, highlight=False, markup=False)

    plan = Config.read({key: config[key] for key in ("method", "rounds", "clients", "cohort", "seed")})
    with wanted.stop.on_interrupt(), wanted.start(path, config, tell) as records:
        tell(f"training: {plan.method}, {plan.rounds} rounds, {plan.cohort} of {plan.clients} nodes a round")
        with Display(console, quiet=quiet) as display:
            display.begin(plan)
            for record in records:
                display.round(record)
    _show(wanted.run, folder, console, quiet)


@app.command(cls=Command)
def init(folder: Annotated[Path, typer.Argument(help="A new folder; it gives the app its name.")]) -> None:
    """Write a complete Flower app for your own model and data."""
    from feddpc.federate import app_template

    for path in app_template.write(folder):
        typer.echo(path)
    typer.echo(f"try it: feddpc federate demo --app {folder} --tls; change federation/task.py; README.md says the rest")


@app.command(cls=Command)
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the files go; what is there stays.")],
    host: Annotated[
        list[str], typer.Option(help="A name or address under which nodes reach the server; may be repeated.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="How many node keys there are to be.")],
    days: Annotated[int, typer.Option(min=1, help="How long the server's certificate is good.")] = 365,
) -> None:
    """Make certificates for a server and keys for its nodes."""
    from feddpc.federate import keys as keyring
    from feddpc.flower import check_flwr

    check_flwr()
    made = keyring.make(folder, list(dict.fromkeys([*host, *keyring.LOOPBACK])), nodes, days)
    good = keyring.read_certificate(made.server).not_valid_after_utc
    typer.echo(f"server: {made.ca}, {made.server}, {made.server_key}; good until {good:%Y-%m-%d}")
    typer.echo(f"to node i alone: {made.folder / 'node-i'}; to every node: {made.ca}; to nobody: {made.ca_key}")


@app.command(cls=Command)
def check(
    address: Annotated[str, typer.Argument(help="HOST:PORT of a SuperLink.")],
    ca: Annotated[Path, typer.Option(help="The authority's certificate, ca.crt.")],
) -> None:
    """Say whether a node could connect to a SuperLink from here, and if not, why."""
    from feddpc.federate.network import check_server
    from feddpc.flower import check_flwr

    check_flwr()
    typer.echo(check_server(address, ca))


def _show(run: Path, folder: Path, console: Console, quiet: bool) -> None:
    """Write curves and page, and show the rounds and the table."""
    from feddpc.report import page, tables

    runs = tables.collect(run)
    failures: list[str] = []
    paths = page.write_all(runs, folder, failures=failures)
    flags.warn_of_failures(failures, folder)
    if quiet:
        return
    console.print(_curve(runs[0].records))
    console.print(tables.rich_table(tables.rows(runs)))
    for path in paths:
        if path.suffix != ".csv":
            console.print(f"{path.stem}: {path}", highlight=False, markup=False)


def _curve(records: list[dict[str, Any]], most: int = 20) -> Table:
    """Return the accuracy over rounds as a table with bars; of many rounds, every so manieth and the last."""
    from rich.table import Table

    table = Table("round", "clients", "accuracy %", "", box=None, pad_edge=False)
    step = -(-len(records) // most)
    for record in records[::-1][::step][::-1]:
        accuracy = record["test_accuracy"] or 0.0
        who = ", ".join(map(str, record["participants"]))
        table.add_row(str(record["round"]), who, f"{100 * accuracy:.2f}", "█" * round(40 * accuracy))
    return table
