"""The places of the charts: empty boxes that the page's script fills, each with what belongs into it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from feddpc.report.figures import GEOMETRY, TRAIN_LOSS, Panel, metric_panel
from feddpc.report.groups import show
from feddpc.report.page import sections
from feddpc.report.page.embed import ANGLE, note_names
from feddpc.report.page.federations import node_table
from feddpc.report.page.html import section
from feddpc.runs.stored import StoredRun

_NOTES = {panel.key: panel.title for panel in GEOMETRY} | {
    ANGLE: "angle to the last step (degrees)",
    "guarded": "guarded clients",
}
#: The notes that are drawn first, if there are any of them.
_FIRST = ("mean_scale", ANGLE)


def curves(known: dict[str, Any], runs: Sequence[StoredRun]) -> str:
    """Return the boxes of all metrics and the training loss; those of primary metrics on held-out samples, if any."""
    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    held_out = [metric_panel(metric, "validation") for metric in dict.fromkeys(run.primary for run in runs)]
    panels = [*map(metric_panel, metrics), TRAIN_LOSS]
    panels += [panel for panel in held_out if any(panel.key in run["rounds"] for run in known["runs"])]
    return _figures([_chart("rounds", panel, escape(panel.title)) for panel in panels])


def notes(runs: Sequence[StoredRun]) -> str:
    """Return two boxes for what the methods wrote down, each with a list to choose from; nothing if they did not."""
    names = note_names(runs)
    if "mean_cosine" in names and ANGLE not in names:
        names.insert(names.index("mean_cosine"), ANGLE)
    if not names:
        return ""
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    figures = [_chart("notes", Panel(name, "", log=True), _choice(names, name)) for name in names[:2]]
    explained = (
        "For FedDPC, the cosine tells how far the clients' updates point along the server's last step before that part "
        "is taken out: 0 (90 degrees) is nothing in common, 1 (0 degrees) the same direction; the angle is that of the "
        "mean cosine. The scale is what the rest is then multiplied by."
    )
    return section("notes", "What the methods noted", _figures(figures), explained if "mean_cosine" in names else "")


def fairness(known: dict[str, Any], runs: Sequence[StoredRun]) -> str:
    """Return the box of how well each client is served, with a list of metrics; nothing if that was not measured."""
    names = dict.fromkeys(name for run in known["runs"] for name in run["clients"])
    if not names:
        return ""
    words = {metric.name: metric.words for run in runs for metric in run.metrics}
    items = []
    for name in names:
        plain = name.removeprefix("finetuned_")
        label = words.get(plain, plain) + (" after local steps" if plain != name else "")
        items.append(f'<option value="{escape(name)}">{escape(show(label))}</option>')
    return section(
        "clients",
        "How each client is served",
        _picture("fairness", "metric", {}).replace("</select>", "".join(items) + "</select>"),
        "On samples held out of each client's training, after the last evaluated round, all seeds together. A narrow "
        "hill treats clients alike. Deviation and worst tenth in every round are among the notes above.",
    )


def schedule(known: dict[str, Any], runs: Sequence[StoredRun]) -> str:
    """Return the box of who took part when; nothing if no run tells."""
    if not known["schedules"]:
        return ""
    options = {i: run["name"] for i, run in enumerate(known["runs"]) if run["schedule"] is not None}
    return section(
        "participation",
        "Who took part",
        _picture("schedule", "run", options) + node_table(runs),
        "A row is a client, a column a round. "
        '<span class="box" style="background:var(--accent)"></span> took part, '
        '<span class="box" style="background:var(--warm)"></span> dropped out, '
        '<span class="box" style="background:var(--ink)"></span> rejected: not finite, '
        "far longer than usual, or not chosen by the robust rule. Runs with the same seed ask the same clients.",
    )


def holdings(known: dict[str, Any], runs: Sequence[StoredRun]) -> str:
    """Return the box of who holds what, or the picture in the folder of the runs, or say that neither is there."""
    tables: dict[int, list[str]] = {}
    for run in known["runs"]:
        if run["holdings"] is not None:
            tables.setdefault(run["holdings"], []).append(run["name"])
    if tables:
        options = {i: names[0] + (f" and {len(names) - 1} more" * (len(names) > 1)) for i, names in tables.items()}
        inside = _picture("holdings", "runs", options)
        note = "A row is a class, a column a client; the bars are the clients' samples. Colours go by the square root."
        return section("partition", "Who holds what", inside, note)
    missing = "<p>These runs do not tell who holds what.</p>"
    return section("partition", "Who holds what", sections.picture(runs) or missing)


def _figures(boxes: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(boxes)}</div>'


def _chart(source: str, panel: Panel, caption: str) -> str:
    options = f'data-of="{source}" data-key="{escape(panel.key)}" data-factor="{panel.factor:g}"'
    name = escape(f"{panel.title or show(panel.key)}; arrow keys read the values")
    return (
        f'<figure><figcaption>{caption}</figcaption><div class="chart" {options}{" data-log" * panel.log} '
        f'tabindex="0" role="application" aria-label="{name}"></div></figure>'
    )


def _choice(names: Sequence[str], chosen: str) -> str:
    options = []
    for name in names:
        mark = " selected" * (name == chosen)
        options.append(f'<option value="{escape(name)}"{mark}>{escape(show(_NOTES.get(name, name)))}</option>')
    return f'<select class="note-choice" aria-label="note">{"".join(options)}</select>'


def _picture(name: str, what: str, options: dict[int, str]) -> str:
    items = "".join(f'<option value="{i}">{escape(show(text))}</option>' for i, text in options.items())
    return (
        f'<p class="tools"><label>{what} <select id="{name}-choice">{items}</select></label>'
        f'<span id="{name}-words" class="words" role="status"></span></p>\n'
        f'<figure><div class="picture" id="{name}" role="img" aria-labelledby="{name}-words"></div></figure>'
    )
