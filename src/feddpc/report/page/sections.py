"""The parts of a page that are text: results, costs, configuration, runs, environment."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from feddpc.report import figures, tables
from feddpc.report.groups import SeedGroup, differing, settings, show, status
from feddpc.report.page.embed import environment
from feddpc.report.page.federations import began_and_ended
from feddpc.report.page.html import boxed, definitions, folded, heads, line, section
from feddpc.runs.stored import StoredRun
from feddpc.storage import explain_os_errors

_PNG = b"\x89PNG\r\n\x1a\n"
#: What is measured of a method's cost: keys of the summary.
_COSTS = ("down", "up", "client_state", "server_state", "down_once", "up_once", "gradients", "passes")


def title(every: Sequence[SeedGroup]) -> str:
    """Return what the page is about."""
    data = sorted({show(g.runs[0].config.data) for g in every})
    what = every[0].label if len(every) == 1 else f"{len(every)} configurations"
    return f"{what} on {data[0] if len(data) == 1 else f'{len(data)} data sets'}"


def lead(every: Sequence[SeedGroup]) -> str:
    """Return the line below the title: the methods, and how many runs there are."""
    methods = list(dict.fromkeys(show(g.method) for g in every))
    count = sum(len(g.runs) for g in every)
    return f"{', '.join(methods)}: {count} run{'s' * (count > 1)}"


def remarks(notes: Sequence[str]) -> str:
    """Return the box of what a reader must know first; none if there is nothing."""
    lines = "".join(f"<li>{escape(show(note))}</li>" for note in notes)
    return f'<ul class="remarks">{lines}</ul>' if lines else ""


def results(table: Sequence[tables.ResultRow], every: Sequence[SeedGroup]) -> str:
    """Return the table of results; each heading is a button that sorts by its column."""
    noted = any(row.notes for row in table)
    least = ("best", "last 10", "final") if all(row.metric.direction == "min" for row in table) else ()
    items = [
        (" data-first=ascending" if name.startswith(least) else "", name, meaning)
        for name, meaning in tables.headings(table).items()
    ]
    items += [(" class=text", "notes", "how runs ended")] * noted
    names = "".join(
        f'<th scope="col"{kind}><button type="button" title="{escape(meaning)}">{escape(name)}</button></th>'
        for kind, name, meaning in items
    )
    lines = []
    for row, (colour, _) in zip(table, figures.styles(every), strict=True):
        label, seeds, *values = tables.cells(row)
        keys = [row.best, row.best_round, row.last10, row.final, row.seconds_per_round]
        both = f"--light:{colour};--dark:{figures.DARK[colour]}"
        cells = [f'<th scope="row"><span class="swatch" style="{both}"></span>{escape(label)}</th>']
        cells.append(f'<td data-value="{len(row.seeds)}">{escape(seeds)}</td>')
        for i, (text, key) in enumerate(zip(values, [*keys, min(row.rounds)], strict=True)):
            known = "" if key is None else repr(key)
            cells.append(f'<td{" class=top" * (i == 0)} data-value="{known}">{escape(text)}</td>')
        if noted:
            cells.append(f'<td class="text wide">{escape("; ".join(row.notes))}</td>')
        lines.append(f"<tr{' class=best' * row.leads}>{''.join(cells)}</tr>")
    return boxed(names, lines, "results sortable", "Results")


def picture(runs: Sequence[StoredRun]) -> str:
    """Return the ``partition.png`` in the folder of the runs, if their own files do not say who holds what."""
    for run in runs:
        for folder, whose in ((run.folder.parent, "these runs"), (run.folder, f"the run {run.folder.name}")):
            path = folder / "partition.png"
            data = b""
            if path.is_file():
                with explain_os_errors(path):
                    data = path.read_bytes()
            if data.startswith(_PNG):
                source = "data:image/png;base64," + base64.b64encode(data).decode()
                return (
                    f'<figure><div class="paper" tabindex="0"><img alt="samples by client and class" src="{source}">'
                    f"</div><figcaption>Samples by client and class in {escape(show(whose))}: a column is a client, "
                    "darker is more.</figcaption></figure>"
                )
    return ""


def costs(every: Sequence[SeedGroup]) -> str:
    """Return what each method moved, remembered and gave away; nothing where no run tells."""
    lines, notes = [], dict[str, list[str]]()
    for group in every:
        costs = next(((r.summary or {}).get("costs") for r in group.runs if r.summary), None)
        if costs and isinstance(costs, dict):
            known = (figures.number(costs.get(key)) for key in _COSTS)
            lines.append(line([group.label, *("" if math.isnan(v) else f"{v:.3g}" for v in known)]))
        if privacy := next((r.privacy for r in group.runs if r.privacy), {}):
            notes.setdefault(_told(privacy), []).append(group.label)
    if not lines and not notes:
        return ""
    names = ["method", *(key.replace("_", " ") for key in _COSTS)]
    table = boxed(heads(names), lines, "plain", "Costs") if lines else ""
    told = [line([", ".join(labels), note]) for note, labels in notes.items()]
    secrets = boxed(heads(["method", "what leaves a client"]), told, "wraps prose", "Privacy") if told else ""
    return section(
        "costs",
        "Costs and privacy",
        table + secrets,
        "Counted while the runs went on, in multiples of the number of parameters: what a participant received and "
        "sent in a round, what client and server remember at the end, what travelled once before round 1. Gradients "
        "and passes through the network are a local step, where FedAvg has one of each.",
    )


def _told(privacy: Mapping[str, Any]) -> str:
    """Return a privacy note with its numbers."""
    disclosed = privacy.get("disclosed")
    items = disclosed.items() if isinstance(disclosed, dict) else ()
    numbers = ", ".join(f"{show(k).replace('_', ' ')}: {show(v)}" for k, v in items)
    return " ".join(filter(None, [show(privacy.get("note", "")), f"({numbers})" if numbers else ""]))


def configuration(every: Sequence[SeedGroup]) -> str:
    """Return what set the configurations apart, then, folded, what they shared."""
    runs = [run for group in every for run in group.runs]
    apart = differing([settings(group.runs[0]) for group in every])
    lines = []
    for group in every:
        own = settings(group.runs[0])
        words = ", ".join(f"{show(k)} = {show(v)}" for k, v in group.hyper.items()) or "none"
        lines.append(line([group.label, words, *(show(own[k]) if k in own else "" for k in apart)]))
    table = boxed(heads(["method", "hyper-parameters", *apart]), lines, "wraps", "Hyper-parameters")
    return table + folded("The same in all runs", definitions(_common([settings(run) for run in runs])))


def run_list(every: Sequence[SeedGroup]) -> str:
    """Return how each run ended and where it ran otherwise than the rest, then, folded, the common environment."""
    machines = [environment(run) for group in every for run in group.runs]
    apart = differing(machines)
    times = any(any(began_and_ended(run)) for group in every for run in group.runs)
    lines = []
    for group in every:
        for run in group.runs:
            early = status(run) in ("diverged", "interrupted", "stopped")
            reason = (run.summary or {}).get("reason") if early else None
            ended = status(run) + (f" ({show(reason)})" if reason else "")
            done = f"{len(run.records)} of {run.config.rounds}"
            machine = environment(run)
            values = [show(run.folder.name), group.label, str(run.config.seed), done, ended]
            values += began_and_ended(run) if times else ()
            lines.append(line([*values, *(show(machine[k]) if k in machine else "" for k in apart)]))
    names = ["run", "method", "seed", "rounds", "ended", *(["first round began", "last round ended"] if times else [])]
    table = boxed(heads([*names, *apart]), lines, "plain", "Runs")
    return table + folded("Environment: what all runs share", definitions(_common(machines)))


def _common(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    apart = set(differing(maps))
    return {k: v for k, v in maps[0].items() if k not in apart}
