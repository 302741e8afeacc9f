"""The command line: run, compare, sweep, reproduce, report, methods, presets, partition, data, bench, federate."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from feddpc._version import __version__
from feddpc.cli import bench, data, explain, federate, presets, reproduce, sweep, train
from feddpc.cli.commands import Command, Group
from feddpc.errors import FeddpcError

app = typer.Typer(
    name="feddpc",
    cls=Group,
    help="Federated learning when clients' data differ and few clients show up.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", cls=Command)(train.run)
app.command("compare", cls=Command)(train.compare)
app.command("report", cls=Command)(explain.report)
app.command("methods", cls=Command)(explain.methods)
app.command("partition", cls=Command)(explain.partition)
app.command("bench", cls=Command)(bench.bench)
app.command("presets", cls=Command)(presets.presets)
app.add_typer(data.app, name="data")
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(sweep.app, name="sweep")
app.add_typer(federate.app, name="federate")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning when clients' data differ and few clients show up."""


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    # Large vectors on huge pages: a server step at 11 million parameters otherwise spends a quarter of its time on page
    # faults. Read by torch when it first allocates, so it must be set before; the library itself leaves it alone.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without the line of code that warned
    try:
        app()
    except FeddpcError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; that is no error, and Python would complain when it flushes
        sys.exit(0)
