"""``feddpc presets``: the paper's settings, complete, to look at or to run."""

from __future__ import annotations

from typing import Annotated

import typer


def presets(
    name: Annotated[str | None, typer.Argument(help="A preset, to print it as TOML for `feddpc run --config`.")] = None,
    method: Annotated[str, typer.Option(help="`feddpc methods` lists them.")] = "feddpc",
    alpha: Annotated[float, typer.Option(help="Dirichlet parameter.")] = 0.2,
    scale: Annotated[str | None, typer.Option(help="paper, small or tiny. [default: paper; small for digits]")] = None,
) -> None:
    """List the presets, or print one as a complete configuration."""
    from feddpc.config import write_toml
    from feddpc.paper.presets import PRESETS, preset, scales

    if name is not None:
        typer.echo(write_toml(preset(name, method, alpha=alpha, scale=scale).asdict()), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it is", "scale", "rounds", "shortened", box=None, pad_edge=False)
    for data, about in PRESETS.items():
        for i, size in enumerate(scales(data).values()):
            first = (data, about) if i == 0 else ("", "")
            table.add_row(*first, size.name, str(preset(data, scale=size.name).rounds), size.short)
    Console(width=max(Console().width, 140)).print(table)
