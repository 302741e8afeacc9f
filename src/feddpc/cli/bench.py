"""``feddpc bench``: what this machine can do, in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def bench(
    workload: Annotated[
        str | None, typer.Option(help="cifar10, cifar100, tiny or all. [default: cifar10 on a CPU, all on a GPU]")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each engine. [default: as many as half a minute allows, 2 to 15]"),
    ] = None,
    device: flags.Device = None,
    methods: Annotated[str, typer.Option(help="Names with commas between them.")] = "feddpc",
    engines: Annotated[str | None, typer.Option(help="Names with commas between them. [default: all]")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between them, or all. [default: float32, on a GPU faster ones too in one engine]"
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="eager: also run a plain loop as researchers write it, FedAvg.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the data and two turns, to see it work.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file for all figures, as JSON.")] = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Measure this machine: engines, precisions and the server step, on the paper's workloads with random images."""
    if against not in (None, "eager"):
        raise unknown("thing to run against", against, ["eager"])
    from rich.console import Console

    from feddpc import methods as registry
    from feddpc.bench import machine, server, turns
    from feddpc.bench.workloads import WORKLOADS
    from feddpc.build import resolve_device
    from feddpc.runs.engine_choice import ENGINES
    from feddpc.storage import replace_text

    names = flags.listed(methods, "--methods")
    for name in names:
        registry.get(name)
    wanted = None if precision is None else _chosen("precision", precision, turns.precisions())
    machines = None if engines is None else _chosen("engine", engines, list(ENGINES))
    place = resolve_device(device or "auto")
    chosen = _workloads(workload, place, list(WORKLOADS))
    console, log = Console(), Console(stderr=True)
    spoken = log.is_terminal and not quiet

    def tell(text: str) -> None:
        if spoken:
            log.print(text, style="dim", highlight=False)

    found: dict[str, Any] = {"machine": machine.describe(place), "workloads": [], "server": []}
    show = not (quiet or as_json)
    if show:
        console.print(_headline(found["machine"]), highlight=False, soft_wrap=True)
    for name in chosen:
        tell(f"{name}: making data")
        work = WORKLOADS[name].quick() if quick else WORKLOADS[name]
        result = turns.measure(
            work,
            device=place,
            names=names,
            wanted=wanted,
            engines=machines,
            against=against,
            rounds=rounds or (2 if quick else None),
            tell=tell,
        )
        found["workloads"].append(result)
        if show:
            _print(console, _about(result), rounds_table(result), result["rows"])
    tell("server step")
    found["server"] = server.measure(server.RESNET18 // (10 if quick else 1), device=place)
    if show:
        title = f"Server step, {found['server'][0]['parameters']:,} parameters, 10 clients, against reading all twice"
        _print(console, title, server_table(found["server"]), found["server"])
    if out:
        replace_text(out, json.dumps(found, indent=1) + "\n")
        if show:
            console.print(f"\nfigures: {out}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(found))


def _chosen(kind: str, text: str, valid: list[str]) -> list[str]:
    names = valid if text == "all" else flags.listed(text, kind)
    for name in names:
        if name not in valid:
            raise unknown(kind, name, [*valid, "all"])
    return names


def _workloads(name: str | None, device: str, valid: list[str]) -> list[str]:
    if name is None:
        return valid[:1] if device == "cpu" else valid
    if name == "all":
        return valid
    if name not in valid:
        raise unknown("workload", name, [*valid, "all"])
    return [name]


def _headline(facts: dict[str, Any]) -> str:
    load = "" if facts["load"] is None else f", load {facts['load']:.1f}"
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    return (
        f"{facts['device']}, {facts['threads']} threads{load}, torch {facts['torch']}, "
        f"feddpc {facts['feddpc']}{commit}, {facts['date']}"
    )


def _about(result: dict[str, Any]) -> str:
    return (
        f"{result['title']}, {result['cohort']} of {result['clients']} clients, alpha {result['alpha']}, batch "
        f"{result['batch_size']}, {result['test_images']:,} test images a round; speed 1 is {result['compared_to']}.\n"
        f"ms: a round, median over {_turns(result)} turns; train: one without evaluation; eval: the difference; "
        "first: seconds of the first two rounds, compilation included."
    )


def _turns(result: dict[str, Any]) -> str:
    made = sorted({row["turns"] for row in result["rows"] if "turns" in row}) or [0]
    return " to ".join(dict.fromkeys(str(n) for n in (made[0], made[-1])))


def _print(console: Console, title: str, table: Table, rows: list[dict[str, Any]]) -> None:
    """Print a table, and below it why some of its lines are empty."""
    console.print(f"\n{title}", highlight=False, soft_wrap=True)
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            what = " ".join(row[k] for k in ("way", "method", "precision") if k in row)
            reasons.setdefault(row["error"], []).append(what)
    for reason, whats in reasons.items():
        console.print(f"{', '.join(whats)} cannot run: {reason}", highlight=False, markup=False, soft_wrap=True)


def rounds_table(result: dict[str, Any]) -> Table:
    """Return a workload's rows as a table; milliseconds, medians over turns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("way", "method", "type"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "train", "eval", "per s", "speed", "first"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        first = [row["way"], row["method"], row["precision"]]
        if "error" in row:
            table.add_row(*first, "-")
            continue
        times = [_milliseconds(row[k]) for k in ("round", "training", "evaluation")]
        rest = [f"{row['rounds_a_second']:.3g}", f"{row['speed']:.2f}", f"{row['warm_up']:.1f}"]
        table.add_row(*first, *times, *rest)
    return table


def _milliseconds(seconds: float) -> str:
    """Write a time with three digits or more.

    >>> _milliseconds(1.2345), _milliseconds(0.0123)
    ('1234', '12.3')
    """
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def server_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of the server step as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for heading in ("ms", "two reads", "over", "GB/s read"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["way"], "-")
            continue
        figures = [1e3 * row["seconds"], 1e3 * row["two_reads"]]
        table.add_row(
            row["way"], *(f"{f:.3g}" for f in figures), f"{row['over']:.2f}", f"{row['gigabytes_a_second']:.3g}"
        )
    return table
