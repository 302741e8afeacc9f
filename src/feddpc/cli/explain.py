"""``feddpc methods``, ``feddpc partition`` and ``feddpc report``: commands that show something without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.errors import BadInputError
from feddpc.registry import short_name

#: What `feddpc methods` shows of the costs, by heading.
COSTS = {"down": "down", "up": "up", "client": "client_state", "server": "server_state"}


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, to see its equations, hyper-parameters and costs.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run one small round of each method and print what was counted.")
    ] = False,
    as_json: flags.Json = False,
) -> None:
    """List the methods, or explain one."""
    from feddpc import methods as registry

    facts = [_facts(registry.get(n), measure) for n in ([name] if name is not None else registry.names())]
    if as_json:
        typer.echo(json.dumps(facts if name is None else facts[0], indent=1))
    elif name is not None:
        _explain(facts[0])
    else:
        _list(facts, measure)


def _facts(cls: Any, measure: bool) -> dict[str, Any]:
    from dataclasses import asdict

    facts = {
        "name": cls.name,
        "title": cls.title,
        "description": cls.describe().partition(">>>")[0].strip(),
        "hyper": cls().hyper(),
        "costs": asdict(cls.costs),
        "privacy": cls.privacy,
        "reference": cls.reference,
    }
    if measure:
        from feddpc.runs import costs

        facts["measured"] = asdict(costs.count_costs(cls.light()))
    return facts


def _list(facts: list[dict[str, Any]], measure: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from feddpc.report.display import print_line

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for heading in (*COSTS, *(("once", "grad") if measure else ())):
        table.add_column(heading, justify="right", overflow="fold", max_width=7)
    table.add_column("what it does")
    for fact in facts:
        cells = _measured_cells(fact["measured"]) if measure else [fact["costs"][key] for key in COSTS.values()]
        table.add_row(fact["name"], *cells, fact["description"].splitlines()[0])
    console = Console()
    console.print(table)
    words = (
        "Costs in multiples of d, the number of parameters: what a participant receives and sends per round, and what "
        "client and server remember. "
    )
    words += (
        "Measured in one round of 10 clients. once: sent before round 1; grad: gradients per local step of FedAvg. "
        if measure
        else "As declared by the methods; --measure counts them in one small round. "
    )
    print_line(console, f"\n{words}`feddpc methods NAME` explains one method.")


def _measured_cells(measured: dict[str, float]) -> list[str]:
    """Return measured costs as short texts, 0 as a dot."""
    once = measured["down_once"] + measured["up_once"]
    values = [*(measured[key] for key in COSTS.values()), once, measured["gradients"]]
    return [f"{round(v, 2):.3g}" if round(v, 2) else "." for v in values]


def _explain(facts: dict[str, Any]) -> None:
    measured = facts.get("measured")
    typer.echo(f"{facts['title']} ({facts['name']})\n\n{facts['description']}\n")
    hyper = ", ".join(f"{k} = {json.dumps(v)}" for k, v in facts["hyper"].items()) or "none"
    typer.echo(f"Hyper-parameters (--set KEY=VALUE): {hyper}")
    how = "declared, and measured in one round of 10 clients" if measured else "declared; --measure counts them"
    typer.echo(f"Costs per participant and round, in multiples of d ({how}):")
    for key, value in facts["costs"].items():
        typer.echo(f"  {key.replace('_', ' '):14}{value:42}{f'{measured[key]:.4g}' if measured else ''}".rstrip())
    if measured:
        once = measured["down_once"], measured["up_once"]
        typer.echo(f"  {'once':14}{'received, sent per client':42}{once[0]:.4g}, {once[1]:.4g}")
        typer.echo(f"  {'local step':14}{'gradients, passes through the network':42}", nl=False)
        typer.echo(f"{measured['gradients']:.4g}, {measured['passes']:.4g}")
    typer.echo(f"Privacy: {facts['privacy']}")
    typer.echo(f"Reference: {facts['reference']}")


@flags.config_flags("data", "clients", "partition", "alpha", "seed")
def partition(
    given: dict[str, Any],
    set_: flags.Set = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    as_json: flags.Json = False,
) -> None:
    """Split the data among clients, print a summary and draw a picture of clients by classes, if there are any."""
    from feddpc.config import Config
    from feddpc.data import schemes
    from feddpc.data.loading import load_as
    from feddpc.report import partition_picture
    from feddpc.resolve import resolve
    from feddpc.storage import explain_os_errors
    from feddpc.task_parts import targets_of
    from feddpc.unused import refuse_unused

    overrides = flags.merge({**given, "cohort": 1}, {}, set_, [])
    if out.suffix.lower() != ".png":
        raise BadInputError(f"--out {out}: the picture is a PNG, name it so")
    asked = overrides.config(Config.method)
    source = load_as(targets_of(asked.task), asked.data, asked.data_options)
    wanted = resolve(asked, source)
    refuse_unused([(overrides.values, wanted)])
    name, options = wanted.partition, wanted.partition_options
    ids = source.client_ids
    split = schemes.make(name, source.y_train, wanted.clients, seed=wanted.seed, client_ids=ids, **options)
    summary = schemes.summary(split, source.y_train, source.classes)
    terms = ", ".join(f"{k} {v}" for k, v in options.items())
    title = (
        f"{short_name(wanted.data)}: {short_name(name)}" + (f" ({terms})" if terms else "") + f", seed {wanted.seed}"
    )
    drawn = source.target == "classes"
    if drawn:
        with explain_os_errors(out):
            partition_picture.draw(
                split.counts(source.y_train, source.classes), out, class_names=source.class_names, title=title
            )
    if as_json:
        picture = str(out) if drawn else None
        typer.echo(json.dumps({**summary, "partition": name, **options, "picture": picture}))
        return
    typer.echo(title)
    for key, value in summary.items():
        typer.echo(f"  {key.replace('_', ' '):20}{value:g}")
    typer.echo(f"picture: {out}" if drawn else f"no picture: the targets of {source.name} are no classes")


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")],
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Print the table of finished and unfinished runs, and write their curves and page."""
    from rich.console import Console

    from feddpc.report import page, tables
    from feddpc.report.display import print_line

    damage: list[str] = []
    runs = tables.collect(folder, damage)
    rows = tables.rows(runs)
    page.refuse_to_overwrite(folder)
    paths = page.write_all(runs, folder, notes=damage)
    if as_json:
        files = [str(path) for path in paths]
        typer.echo(json.dumps({"table": tables.as_dicts(rows), "files": files, "missing": damage}))
    elif not quiet:
        for note in damage:
            typer.echo(f"missing: {note}", err=True)
        console = Console(soft_wrap=True)
        console.print(tables.rich_table(rows))
        for path in paths:
            print_line(console, str(path))
