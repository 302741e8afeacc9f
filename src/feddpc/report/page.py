"""The page of a comparison: one HTML file with table, curves, configuration and numbers, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from feddpc._version import __version__
from feddpc.errors import BadInputError, RunFolderError
from feddpc.report import figures, tables
from feddpc.report.groups import Group, differing, groups, settings, show, status
from feddpc.run.files import explained, replace_text
from feddpc.run.record import StoredRun, is_run

_PNG = b"\x89PNG\r\n\x1a\n"


def write_all(runs: Sequence[StoredRun], folder: Path) -> list[Path]:
    """Write ``curves.png``, ``table.csv`` and ``report.html`` into ``folder`` and return their paths."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    curves, table, page = (folder / name for name in ("curves.png", "table.csv", "report.html"))
    figures.save(figures.curves(runs), curves)
    replace_text(table, tables.as_csv(tables.rows(runs)))
    return [curves, table, write(runs, page)]


def refuse_to_overwrite(folder: Path) -> None:
    """Raise if the report's files in ``folder`` are not ours: some are there, and no page of ours beside them."""
    if is_run(folder) or (folder / "compare.json").is_file():
        return
    there = [folder / name for name in ("report.html", "table.csv", "curves.png") if (folder / name).exists()]
    page = folder / "report.html"
    with explained(folder):
        ours = page.is_file() and '<meta name="generator" content="feddpc">' in page.read_text(
            encoding="utf-8", errors="replace"
        )
    if there and not ours:
        raise RunFolderError(f"{there[0]} is not from an earlier report and would be overwritten: move it away")


def write(runs: Sequence[StoredRun], path: Path, *, title: str | None = None) -> Path:
    """Write the report of ``runs`` to ``path``: a single file that works offline, in print and on a phone."""
    if not runs:
        raise BadInputError(f"no runs to report in {path}: give at least one")
    replace_text(path, render(runs, title=title))
    return path


def render(runs: Sequence[StoredRun], *, title: str | None = None) -> str:
    """Return the report as HTML text; the same runs give the same text."""
    every = groups(runs)
    table = tables.rows(runs)
    script = _part("page.js")
    # The browser runs the script with this hash and no other, so nothing in a run folder can become a program.
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_part("page.html")).substitute(
        title=escape(show(title or _title(every))),
        lead=escape(_lead(every)),
        style=_part("page.css"),
        script=script,
        script_hash=f"sha256-{script_hash}",
        table=_results(table, every),
        curves=_charts(runs, figures.CURVES),
        geometry=_geometry(runs),
        partition=_partition(runs),
        costs=_costs(every),
        configuration=_configuration(every),
        runs=_runs(every),
        environment=_definitions(_common([_environment(run) for run in runs]))
        or "<p>Nothing recorded that all runs share.</p>",
        version=escape(__version__),
        data=_embedded(numbers(runs)),
    )


def numbers(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Return the table and every run's numbers, a list a key; what is not a finite number is None."""
    return {
        "table": tables.as_dicts(tables.rows(runs)),
        "runs": [
            {"name": run.folder.name, "label": group.label, "status": status(run)}
            | {"config": run.config.asdict(), "rounds": _columns(run.records)}
            for group in groups(runs)
            for run in group.runs
        ],
    }


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    keys = dict.fromkeys(k for record in records for k, v in record.items() if v is None or isinstance(v, int | float))
    return {key: [_finite(record.get(key)) for record in records] for key in keys}


def _finite(value: Any) -> float | None:
    if isinstance(value, int):
        return value
    return None if math.isnan(known := figures.number(value)) else known


def _embedded(value: Any) -> str:
    # Inside <script> only "<" could end the element; as \u003c it is the same JSON.
    return json.dumps(_jsonable(value), separators=(",", ":")).replace("<", "\\u003c")


def _jsonable(value: Any) -> Any:
    """Replace numbers that JSON cannot write, which a configuration may hold, by their names."""
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _part(name: str) -> str:
    return (files("feddpc.report") / name).read_text(encoding="utf-8").strip()


def _title(every: Sequence[Group]) -> str:
    data = sorted({show(g.runs[0].config.data) for g in every})
    what = every[0].label if len(every) == 1 else f"{len(every)} configurations"
    return f"{what} on {data[0] if len(data) == 1 else f'{len(data)} data sets'}"


def _lead(every: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(show(g.method) for g in every))
    count = sum(len(g.runs) for g in every)
    return f"{', '.join(methods)}: {count} run{'s' * (count > 1)}"


def _charts(runs: Sequence[StoredRun], panels: Iterable[figures.Panel]) -> str:
    """Return the charts. Whoever wants interactive ones replaces this function; `numbers` are in the page already."""
    found = []
    for panel in panels:
        draw = figures.curves if panel in figures.CURVES else figures.geometry
        if figure := draw(runs, [panel]):
            image = figures.svg(figure, prefix=panel.key).replace("<svg", "<svg focusable='false'", 1)
            name = escape(f"{panel.title} over the rounds; the numbers are in the table and in the download")
            found.append(f'<figure class="paper" role="img" aria-label="{name}">{image}</figure>')
    return f'<div class="figures">{"".join(found)}</div>' if found else ""


def _geometry(runs: Sequence[StoredRun]) -> str:
    charts = _charts(runs, figures.GEOMETRY)
    if not charts:
        return ""
    return f"""<section aria-labelledby="geometry">
<h2 id="geometry">What FedDPC did to the updates</h2>
{charts}
<p class="note">The cosine tells how far the clients' updates point along the server's last step before that part is
taken out: 0 is nothing in common, 1 the same direction. The scale is what the rest is then multiplied by.</p>
</section>"""


def _partition(runs: Sequence[StoredRun]) -> str:
    for run in runs:
        for folder, whose in ((run.folder.parent, "these runs"), (run.folder, f"the run {run.folder.name}")):
            path = folder / "partition.png"
            data = b""
            if path.is_file():
                with explained(path):
                    data = path.read_bytes()
            if data.startswith(_PNG):
                source = "data:image/png;base64," + base64.b64encode(data).decode()
                return f"""<section aria-labelledby="partition">
<h2 id="partition">Who holds what</h2>
<figure>
<div class="paper picture" tabindex="0"><img alt="samples by client and class" src="{source}"></div>
<figcaption>Samples by client and class in {escape(show(whose))}: a column is a client, darker is more.</figcaption>
</figure>
</section>"""
    return ""


def _results(table: Sequence[tables.Row], every: Sequence[Group]) -> str:
    noted = any(row.notes for row in table)
    heads = "".join(
        f'<th scope="col"{kind}><button type="button" title="{escape(meaning)}">{escape(name)}</button></th>'
        for kind, items in (("", tables.HEADINGS), (" class=text", {"notes": "how runs ended"} if noted else {}))
        for name, meaning in items.items()
    )
    lines = []
    for row, (colour, _) in zip(table, figures.styles(every), strict=True):
        label, seeds, *values = tables.cells(row)
        keys = [row.best_accuracy, row.best_round, row.last10_accuracy, row.final_accuracy, row.seconds_per_round]
        cells = [f'<th scope="row"><span class="swatch" style="background:{colour}"></span>{escape(label)}</th>']
        cells.append(f'<td data-value="{len(row.seeds)}">{escape(seeds)}</td>')
        for i, (text, key) in enumerate(zip(values, [*keys, min(row.rounds)], strict=True)):
            known = "" if key is None else repr(key)
            cells.append(f'<td{" class=top" * (i == 0)} data-value="{known}">{escape(text)}</td>')
        if noted:
            cells.append(f'<td class="text wide">{escape("; ".join(row.notes))}</td>')
        lines.append(f"<tr{' class=best' * row.best}>{''.join(cells)}</tr>")
    return _boxed(heads, lines, "results sortable", "Results")


def _boxed(heads: str, lines: Iterable[str], kind: str, name: str) -> str:
    """Return a table in a box that scrolls by itself, also by keyboard."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def _configuration(every: Sequence[Group]) -> str:
    runs = [run for group in every for run in group.runs]
    same = _definitions(_common([settings(run) for run in runs]))
    apart = differing([settings(group.runs[0]) for group in every])
    heads = ["method", "hyper-parameters", *apart]
    lines = []
    for group in every:
        own = settings(group.runs[0])
        words = ", ".join(f"{show(k)} = {show(v)}" for k, v in group.hyper.items()) or "none"
        lines.append(_line([group.label, words, *(show(own[k]) if k in own else "" for k in apart)]))
    table = _boxed(_heads(heads), lines, "wraps", "Hyper-parameters")
    return f"<h3>The same in all runs</h3>{same}<h3>What differed</h3>{table}"


#: What is measured of a method's cost, by its key in the summary.
_COSTS = {
    "down": "down",
    "up": "up",
    "client state": "client_state",
    "server state": "server_state",
    "down once": "down_once",
    "up once": "up_once",
    "gradients": "gradients",
    "passes": "passes",
}


def _costs(every: Sequence[Group]) -> str:
    """Return what each method moved, remembered and gave away; nothing where no run tells."""
    lines, notes = [], dict[str, list[str]]()
    for group in every:
        costs: Mapping[str, Any] = next(((r.summary or {}).get("costs") or {} for r in group.runs if r.summary), {})
        if costs:
            known = (figures.number(costs.get(key)) for key in _COSTS.values())
            lines.append(_line([group.label, *("" if math.isnan(v) else f"{v:.3g}" for v in known)]))
        if privacy := next((r.privacy for r in group.runs if r.privacy), {}):
            notes.setdefault(_told(privacy), []).append(group.label)
    if not lines and not notes:
        return ""
    table = _boxed(_heads(["method", *_COSTS]), lines, "plain", "Costs")
    told = [_line([", ".join(labels), note]) for note, labels in notes.items()]
    return f"""<section aria-labelledby="costs">
<h2 id="costs">Costs and privacy</h2>
{table}
{_boxed(_heads(["method", "what leaves a client"]), told, "wraps prose", "Privacy")}
<p class="note">Counted while the runs went on, in multiples of the number of parameters: what a participant received
and sent in a round, what client and server remember at the end, what travelled once before round 1. Gradients and
passes through the network are a local step, where FedAvg has one of each.</p>
</section>"""


def _told(privacy: Mapping[str, Any]) -> str:
    """Return a privacy note with its numbers."""
    disclosed = privacy.get("disclosed")
    items = disclosed.items() if isinstance(disclosed, dict) else ()
    numbers = ", ".join(f"{show(k).replace('_', ' ')}: {show(v)}" for k, v in items)
    return " ".join(filter(None, [show(privacy.get("note", "")), f"({numbers})" if numbers else ""]))


def _runs(every: Sequence[Group]) -> str:
    machines = [_environment(run) for group in every for run in group.runs]
    apart = differing(machines)
    lines = []
    for group in every:
        for run in group.runs:
            reason = (run.summary or {}).get("reason") if status(run) in ("diverged", "interrupted") else None
            ended = status(run) + (f" ({show(reason)})" if reason else "")
            done = f"{len(run.records)} of {run.config.rounds}"
            machine = _environment(run)
            values = [show(run.folder.name), group.label, str(run.config.seed), done, ended]
            lines.append(_line([*values, *(show(machine[k]) if k in machine else "" for k in apart)]))
    return _boxed(_heads(["run", "method", "seed", "rounds", "ended", *apart]), lines, "plain", "Runs")


def _heads(names: Iterable[str]) -> str:
    return "".join(f'<th scope="col" class="text">{escape(show(name))}</th>' for name in names)


def _line(values: Sequence[str]) -> str:
    first, *rest = (escape(value) for value in values)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td class=text>{value}</td>" for value in rest)}</tr>'


def _environment(run: StoredRun) -> dict[str, Any]:
    """Return what is known of the machine; of the command, not where the program lies."""
    known = dict(run.environment)
    known.pop("fingerprint", None)  # for resuming, not for reading
    timings, command = known.pop("engine_seconds", None), known.get("command")
    if isinstance(timings, dict):
        known |= {f"trial round, {name} (s)": seconds for name, seconds in timings.items()}
    if isinstance(command, list) and command:
        known["command"] = shlex.join([Path(str(command[0])).name, *map(str, command[1:])])
    return known


def _common(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    apart = set(differing(maps))
    return {k: v for k, v in maps[0].items() if k not in apart}


def _definitions(values: Mapping[str, Any]) -> str:
    texts = {show(k): show(v) for k, v in values.items()}
    boxes = []
    for name, text in texts.items():
        kind = " class=long" if len(name + text) > 28 else ""
        boxes.append(f"<div{kind}><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>")
    return f"<dl>{''.join(boxes)}</dl>" if boxes else ""
