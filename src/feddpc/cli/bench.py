"""``feddpc bench``: what this machine can do, in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.cli import flags
from feddpc.config import choices_of
from feddpc.errors import BadInputError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from feddpc.report.table import Table


@flags.config_flags("device")
def bench(
    given: dict[str, Any],
    workload: Annotated[
        str | None,
        typer.Option(
            help="cifar10, cifar100, tiny, mnist, text-transformer, text-lstm or all. [default: cifar10; on a GPU all]"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each engine. [default: as many as half a minute allows, 2 to 15]"),
    ] = None,
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
    ranks: Annotated[
        str | None,
        typer.Option(help="Also rounds that so many processes of this machine share, with commas between: 1,2."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the data and two turns, to see it work.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file for all figures, as JSON.")] = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Measure this machine: engines, precisions and the server step, on workloads with random data.

    Under torchrun or srun, measure rounds that all its processes share instead.
    """
    if against not in (None, "eager"):
        raise unknown("thing to run against", against, ["eager"])
    from rich.console import Console

    from feddpc.bench import machine, server_times, turns
    from feddpc.bench.entrants import engine_names
    from feddpc.bench.rank_rounds import TIMEOUT
    from feddpc.bench.workloads import WORKLOADS
    from feddpc.ranks import join
    from feddpc.resolve import resolve_device
    from feddpc.storage import replace_text

    names = flags.method_names(methods, None) or []
    device = resolve_device(given.get("device", "auto"))
    usual = list(WORKLOADS)[: 1 if device == "cpu" else None]
    chosen = _select("workload", workload, list(WORKLOADS)) or usual
    options: dict[str, Any] = {
        "wanted": _select("precision", precision, choices_of("precision")),
        "rounds": rounds or (2 if quick else None),
    }
    local: dict[str, Any] = {
        "engines": _select("engine", engines, engine_names()),
        "against": against,
        "ranks": _numbers_of_ranks(ranks),
    }
    together = join(device, TIMEOUT)
    if together.size > 1 and any(local.values()):
        raise BadInputError(
            f"{together.size} ranks were started, which are measured as they are: leave out --engines, --against and "
            "--ranks"
        )
    quiet = quiet or together.rank > 0
    console, log = Console(quiet=quiet or as_json), Console(stderr=True)
    speak = log.is_terminal and not quiet

    def tell(text: str) -> None:
        if speak:
            log.print(text, style="dim", highlight=False)

    figures: dict[str, Any] = {"machine": machine.describe(device), "workloads": [], "server": []}
    console.print(_headline(figures["machine"]), highlight=False, soft_wrap=True)
    for name in chosen:
        tell(f"{name}: making data")
        work = WORKLOADS[name].quick() if quick else WORKLOADS[name]
        if together.size > 1:
            result = turns.time_joined(work, together, device=device, names=names, tell=tell, **options)
        else:
            result = turns.time_rounds(work, device=device, names=names, tell=tell, **options, **local)
        figures["workloads"].append(result)
        _print(console, rounds_table(result), result["rows"])
    if together.size == 1:
        tell("server step")
        rows = figures["server"] = server_times.time_server_steps(
            server_times.RESNET18 // (10 if quick else 1), device=device
        )
        _print(console, server_table(rows), rows)
    if together.rank:
        return
    if out:
        replace_text(out, json.dumps(figures, indent=1) + "\n")
        console.print(f"\nfigures: {out}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(figures))


def _select(kind: str, text: str | None, valid: Sequence[str]) -> list[str] | None:
    """Read names with commas between them, or ``all``; None if the flag was not given."""
    if text is None:
        return None
    names = list(valid) if text == "all" else flags.listed(text, kind)
    for name in names:
        if name not in valid:
            raise unknown(kind, name, [*valid, "all"])
    return names


def _numbers_of_ranks(text: str | None) -> list[int]:
    """Read numbers of processes with commas between them."""
    words = [] if text is None else flags.listed(text, "number of ranks")
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise BadInputError(f"--ranks {text}: {word!r} is no number of processes: give numbers such as 1,2")
    return [int(word) for word in words]


def _headline(facts: dict[str, Any]) -> str:
    load = "" if facts["load"] is None else f", load {facts['load']:.1f}"
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    return (
        f"{facts['device']}, {facts['threads']} threads{load}, torch {facts['torch']}, "
        f"feddpc {facts['feddpc']}{commit}, {facts['date']}"
    )


def _print(console: Console, table: Table, rows: list[dict[str, Any]]) -> None:
    """Print a table, and below it why some of its rows are empty."""
    console.print(f"\n{table.title}", highlight=False, soft_wrap=True)
    console.print(table.rich())
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            what = " ".join(row[key] for key in ("way", "method", "precision") if key in row)
            reasons.setdefault(row["error"], []).append(what)
    for reason, entrants in reasons.items():
        console.print(f"{', '.join(entrants)} cannot run: {reason}", highlight=False, markup=False, soft_wrap=True)


def rounds_table(result: dict[str, Any]) -> Table:
    """Return a workload's rows as a table; milliseconds, medians over turns."""
    from feddpc.report.table import Table

    turns_made = sorted({row["turns"] for row in result["rows"] if "turns" in row}) or [0]
    turns = " to ".join(dict.fromkeys(str(n) for n in (turns_made[0], turns_made[-1])))
    split = f"alpha {result['alpha']}" if result["partition"] == "dirichlet" else result["partition"]
    title = (
        f"{result['title']}, {result['cohort']} of {result['clients']} clients, {split}, batch "
        f"{result['batch_size']}, {result['test_samples']:,} test samples per round; speed 1 is "
        f"{result['compared_to']}.\nms: a round, median over {turns} turns; train: one without evaluation; eval: the "
        "difference; first: seconds of the first two rounds, compilation included."
    )
    rows = []
    for row in result["rows"]:
        cells = ["-"] * 6
        if "error" not in row:
            times = [_milliseconds(row[key]) for key in ("round", "training", "evaluation")]
            cells = [*times, f"{row['rounds_a_second']:.3g}", f"{row['speed']:.2f}", f"{row['warm_up']:.1f}"]
        rows.append([row["way"], row["method"], row["precision"], *cells])
    headings = ("way", "method", "type", "ms", "train", "eval", "per s", "speed", "first")
    return Table("rounds", title, headings, rows, text_columns=frozenset({"method", "type"}))


def _milliseconds(seconds: float) -> str:
    """Write a time with three digits or more.

    >>> _milliseconds(1.2345), _milliseconds(0.0123)
    ('1234', '12.3')
    """
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def server_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of the server step as a table."""
    from feddpc.report.table import Table

    title = f"Server step, {rows[0]['parameters']:,} parameters, 10 clients, against reading all twice"
    lines = []
    for row in rows:
        cells = ["-"] * 4
        if "error" not in row:
            times = [f"{1e3 * row[key]:.3g}" for key in ("seconds", "two_reads")]
            cells = [*times, f"{row['over']:.2f}", f"{row['gigabytes_a_second']:.3g}"]
        lines.append([row["way"], *cells])
    return Table("server", title, ("rule", "ms", "two reads", "over", "GB/s read"), lines)
