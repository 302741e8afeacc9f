"""``feddpc methods``, ``feddpc partition`` and ``feddpc report``: commands that show and do not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.errors import BadInputError
from feddpc.registry import short_name


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
    facts = [_facts(cls) for cls in classes]
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for heading in ("down", "up", "client", "server", "once", "grad"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("what it does")
    for fact in facts:
        first, *_ = fact["description"].splitlines()
        table.add_row(fact["name"], *_measured_cells(fact["measured"]), first)
    console = Console()
    console.print(table)
    console.print(
        "\nMeasured just now, in one round of 10 clients. In multiples of d, the number of parameters: what a "
        "participant receives and sends each round, what client and server remember, what travels once before round 1. "
        "Gradients are those of a local step, where FedAvg has one. "
        "`feddpc methods NAME` tells more.",
        highlight=False,
    )


def _measured_cells(measured: dict[str, float]) -> list[str]:
    """Write costs short: whole numbers plainly, 0 as a dot."""
    once = measured["down_once"] + measured["up_once"]
    values = [*(measured[k] for k in ("down", "up", "client_state", "server_state")), once, measured["gradients"]]
    return [f"{round(v, 2):.3g}" if round(v, 2) else "." for v in values]


def _facts(cls: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from feddpc.runs.costs import measure

    return {
        "name": cls.name,
        "title": cls.title,
        "description": cls.describe().partition(">>>")[0].strip(),
        "hyper": cls().hyper(),
        "costs": asdict(cls.costs),
        "measured": asdict(measure(cls.light())),
        "privacy": cls.privacy,
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
    typer.echo("Costs a participant and round, in multiples of d (specified, and measured in one round of 10 clients):")
    for key, value in facts["costs"].items():
        typer.echo(f"  {key.replace('_', ' '):14}{value:42}{facts['measured'][key]:.4g}")
    once = facts["measured"]["down_once"], facts["measured"]["up_once"]
    typer.echo(f"  {'once':14}{'received, sent by each client':42}{once[0]:.4g}, {once[1]:.4g}")
    typer.echo(f"  {'a local step':14}{'gradients, passes through the network':42}", nl=False)
    typer.echo(f"{facts['measured']['gradients']:.4g}, {facts['measured']['passes']:.4g}")
    typer.echo(f"Privacy: {facts['privacy']}")
    typer.echo(f"Reference: {facts['reference']}")


@flags.config_flags("data", "clients", "partition", "alpha", "seed")
def partition(
    given: dict[str, Any],
    set_: flags.Set = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    as_json: flags.Json = False,
) -> None:
    """Deal the data to clients, print a summary and draw the client-by-class picture."""
    from feddpc.config import Config
    from feddpc.data import load
    from feddpc.data import partition as partitions
    from feddpc.experiment import partition_options
    from feddpc.report import partition_picture
    from feddpc.storage import explain_os_errors

    wanted = flags.wishes(given | _small(given.get("clients")), {}, set_, []).config(Config().method)
    if out.suffix.lower() != ".png":
        raise BadInputError(f"--out {out}: the picture is a PNG, name it so")
    source = load(wanted.data)
    options = partition_options(wanted, len(source.y_train))
    dealt = partitions.make(wanted.partition, source.y_train, wanted.clients, seed=wanted.seed, **options)
    summary = partitions.summary(dealt, source.y_train, source.classes)
    terms = ", ".join(f"{k} {v}" for k, v in options.items())
    title = (
        f"{short_name(wanted.data)}: {short_name(wanted.partition)}"
        + (f" ({terms})" if terms else "")
        + f", seed {wanted.seed}"
    )
    with explain_os_errors(out):
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

    damage: list[str] = []
    runs = tables.collect(folder, damage)
    rows = tables.rows(runs)
    page.refuse_to_overwrite(folder)
    paths = page.write_all(runs, folder, notes=damage)
    if as_json:
        found = {"table": tables.as_dicts(rows), "files": [str(p) for p in paths], "missing": damage}
        typer.echo(json.dumps(found))
    elif not quiet:
        for note in damage:
            typer.echo(f"missing: {note}", err=True)
        console = Console(soft_wrap=True)
        console.print(tables.rich_table(rows))
        for path in paths:
            console.print(str(path), highlight=False, markup=False)
