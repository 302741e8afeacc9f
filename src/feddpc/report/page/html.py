"""Small pieces of HTML: tables in boxes that scroll, lists of names and values. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from feddpc.report.groups import show


def boxed(heads: str, lines: Iterable[str], kind: str, name: str) -> str:
    """Return a table in a box that scrolls by itself, also by keyboard."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def heads(names: Iterable[str]) -> str:
    """Return the cells of a table's head."""
    return "".join(f'<th scope="col" class="text">{escape(show(name))}</th>' for name in names)


def line(values: Sequence[str]) -> str:
    """Return a row of a table; its first cell is its name.

    >>> line(["fedavg", "<1>"])
    '<tr><th scope="row">fedavg</th><td class=text>&lt;1&gt;</td></tr>'
    """
    first, *rest = (escape(value) for value in values)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td class=text>{value}</td>" for value in rest)}</tr>'


def definitions(values: Mapping[str, Any]) -> str:
    """Return names and values as a list in columns; long ones have a line of their own, after the others."""
    texts = {show(k): show(v) for k, v in values.items()}
    boxes = []
    for name, text in texts.items():
        kind = " class=long" if len(name + text) > 28 else ""
        boxes.append(f"<div{kind}><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>")
    return f"<dl>{''.join(boxes)}</dl>" if boxes else ""


def folded(summary: str, inside: str) -> str:
    """Return what opens on a click, or nothing if there is nothing inside."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>" if inside else ""


def section(name: str, title: str, inside: str, note: str = "") -> str:
    """Return a part of the page under a heading; ``inside`` and ``note`` are HTML already."""
    below = f'\n<p class="note">{note}</p>' if note else ""
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(title)}</h2>\n{inside}{below}\n</section>'
