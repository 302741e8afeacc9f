"""The command line: run, compare, sweep, reproduce, report, methods, presets, partition, data, bench, federate."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from feddpc._version import __version__
from feddpc.cli.commands import LazyGroup
from feddpc.errors import FeddpcError


class Commands(LazyGroup):
    """The commands of feddpc."""

    lazy = {  # noqa: RUF012 -- a constant
        "run": ("feddpc.cli.train:run", "Train one model with one method."),
        "compare": ("feddpc.cli.train:compare", "Train with several methods and seeds on the same data."),
        "report": ("feddpc.cli.explain:report", "Print the table of runs, and write their curves and page."),
        "methods": ("feddpc.cli.explain:methods", "List the methods, or explain one."),
        "partition": ("feddpc.cli.explain:partition", "Split the data among clients and draw the result."),
        "bench": ("feddpc.cli.bench:bench", "Measure engines, precisions and server step on this machine."),
        "presets": ("feddpc.cli.presets:presets", "List the presets, or print one as a complete configuration."),
        "data": ("feddpc.cli.data:app", "List, verify and fetch data sets."),
        "reproduce": ("feddpc.cli.reproduce:app", "Run the paper's tables and figures again."),
        "sweep": ("feddpc.cli.sweep:app", "Try settings of several methods with one budget, and choose."),
        "federate": ("feddpc.cli.federate:app", "Run a real federation over Flower."),
    }


app = typer.Typer(
    name="feddpc",
    cls=Commands,
    help="Federated learning when clients' data differ and few clients show up.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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


def _tell(error: FeddpcError) -> None:
    """Print an error, once if several ranks have the same one and can know that of each other."""
    import hashlib  # here, since the command line's help imports this module

    from feddpc.launch import PRINTED

    ranks = sys.modules.get("feddpc.ranks")
    rank, before = _number("RANK", "SLURM_PROCID"), ""
    if ranks is not None and ranks.have_met():
        if rank != getattr(error, "speaker", 0):
            return
    elif folder := os.environ.get(PRINTED):  # ranks that `feddpc --ranks` has started: the first one prints for all
        try:
            (Path(folder) / hashlib.blake2b(str(error).encode(), digest_size=16).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return
    elif rank:  # it may be the only one that fails
        before = f"rank {rank}: "
    typer.echo(f"error: {before}{error}", err=True)


def _number(*names: str) -> int:
    """Return the first whole number among some environment variables, else 0."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), 0)


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    # Large vectors on huge pages: a server step at 11 million parameters otherwise spends a quarter of its time on page
    # faults. Read by torch when it first allocates, so it must be set before; the library itself leaves it alone.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without the line of code that warned
    if _number("RANK", "SLURM_PROCID"):  # rank 0 says everything that all ranks have to say
        warnings.simplefilter("ignore")
    try:
        app()
    except FeddpcError as error:
        _tell(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; that is no error, and Python would complain when it flushes
        sys.exit(0)
