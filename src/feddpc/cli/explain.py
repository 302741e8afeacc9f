"""``feddpc methods``, ``feddpc partition`` and ``feddpc report``: commands that show and do not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.errors import BadInputError


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, to see its equations, hyper-parameters and costs.")
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """List the methods, or explain one."""
    from feddpc import methods as registry

    if name is not None:
        _explain(name, as_json)
        return
    classes = [registry.get(n) for n in registry.names()]
    if as_json:
        typer.echo(json.dumps([_facts(cls) for cls in classes], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "down", "up", "client", "server"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it does")
    for cls in classes:
        costs = cls.costs
        first, *_ = cls.describe().splitlines()
        table.add_row(cls.name, costs.down, costs.up, costs.client_state, costs.server_state, first)
    console = Console()
    console.print(table)
    console.print(
        "\nIn multiples of d, the number of parameters: what a participant receives and sends each round, and what "
        "client and server remember (N clients, C clusters). `feddpc methods NAME` tells more.",
        highlight=False,
    )


def _facts(cls: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "name": cls.name,
        "title": cls.title,
        "description": cls.describe().partition(">>>")[0].strip(),
        "hyper": cls().hyper(),
        "costs": asdict(cls.costs),
        "reference": cls.reference,
    }


def _explain(name: str, as_json: bool) -> None:
    from feddpc import methods as registry

    facts = _facts(registry.get(name))
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(f"{facts['title']} ({facts['name']})\n\n{facts['description']}\n")
    hyper = ", ".join(f"{k} = {json.dumps(v)}" for k, v in facts["hyper"].items()) or "none"
    typer.echo(f"Hyper-parameters (--set KEY=VALUE): {hyper}")
    typer.echo("Costs a participant and round, in multiples of d:")
    for key, value in facts["costs"].items():
        typer.echo(f"  {key.replace('_', ' '):14}{value}")
    typer.echo(f"Reference: {facts['reference']}")


def partition(
    data: flags.Data = None,
    clients: flags.Clients = None,
    alpha: flags.Alpha = None,
    partition: flags.PartitionName = None,
    seed: Annotated[int | None, typer.Option(help="[default: 0]")] = None,
    set_: flags.Set = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    as_json: flags.Json = False,
) -> None:
    """Deal the data to clients, print a summary and draw the client-by-class picture."""
    from feddpc.data import load
    from feddpc.data import partition as partitions
    from feddpc.report import partition_picture
    from feddpc.run.config import Config
    from feddpc.run.experiment import partition_options
    from feddpc.run.files import explained

    given = {"data": data, "clients": clients, "alpha": alpha, "partition": partition, "seed": seed}
    wanted = flags.wishes({k: v for k, v in given.items() if v is not None} | _small(clients), {}, set_, []).config(
        Config().method
    )
    if out.suffix.lower() != ".png":
        raise BadInputError(f"--out {out}: the picture is a PNG, name it so")
    source = load(wanted.data)
    options = partition_options(wanted, len(source.y_train))
    dealt = partitions.make(wanted.partition, source.y_train, wanted.clients, seed=wanted.seed, **options)
    summary = partitions.summary(dealt, source.y_train, source.classes)
    terms = ", ".join(f"{k} {v}" for k, v in options.items())
    title = f"{wanted.data}: {wanted.partition}" + (f" ({terms})" if terms else "") + f", seed {wanted.seed}"
    with explained(out):
        partition_picture.draw(
            dealt.counts(source.y_train, source.classes), out, class_names=source.class_names, title=title
        )
    if as_json:
        typer.echo(json.dumps({**summary, "partition": wanted.partition, **options, "picture": str(out)}))
        return
    typer.echo(title)
    for key, value in summary.items():
        typer.echo(f"  {key.replace('_', ' '):20}{value:g}")
    typer.echo(f"picture: {out}")


def _small(clients: int | None) -> dict[str, int]:
    """A partition has no cohort; keep the default one from being larger than the population."""
    return {"cohort": min(10, clients)} if clients is not None and clients >= 1 else {}


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")],
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Print the table of finished and unfinished runs and write curves and page anew."""
    from rich.console import Console

    from feddpc.report import page, tables

    runs = tables.collect(folder)
    rows = tables.rows(runs)
    page.refuse_to_overwrite(folder)
    paths = page.write_all(runs, folder)
    if as_json:
        typer.echo(json.dumps({"table": tables.as_dicts(rows), "files": [str(p) for p in paths]}))
    elif not quiet:
        console = Console(soft_wrap=True)
        console.print(tables.rich_table(rows))
        for path in paths:
            console.print(str(path), highlight=False, markup=False)
