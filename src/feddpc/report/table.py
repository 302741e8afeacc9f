"""A table of text for the terminal, Markdown and spreadsheets; and the table of what a sweep chose."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from feddpc.registry import short_name
from feddpc.report.groups import show
from feddpc.study.choose import Choice
from feddpc.tasks.metrics import ACCURACY

if TYPE_CHECKING:
    import rich.table

#: Text of at most so many characters is not wrapped.
SHORT = 12
SWEEP_LEGEND = (
    "Values: {}, mean over seeds ± sample standard deviation. test: for a setting chosen by validation, in the "
    "round that validation data choose; for one chosen by test, the best of any round, which is optimistic. budget: "
    "{}."
)
#: A share as percent, with its spread if there is one.
percent = ACCURACY.text


@dataclass(frozen=True)
class Table:
    """Headings and rows of cells. The first column is text, the others are numbers unless named in ``text_columns``."""

    name: str  #: of its file, without suffix
    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    bold: frozenset[int] = frozenset()  #: rows in bold
    text_columns: frozenset[str] = frozenset()

    def markdown(self) -> str:
        """Return the table for a document, notes below.

        >>> print(Table("t", "T", ("a", "b"), [["x", "1"]], ["Note."], bold=frozenset({0})).markdown())
        **T**
        <BLANKLINE>
        | a | b |
        |---|---:|
        | **x** | **1** |
        <BLANKLINE>
        Note.
        """
        rule = "|".join("---" if self._is_text(heading) else "---:" for heading in self.headings)
        lines = [f"**{self.title}**", "", _piped(self.headings), f"|{rule}|"]
        for i, row in enumerate(self.rows):
            lines.append(_piped([f"**{cell}**" if i in self.bold and cell else cell for cell in row]))
        return "\n".join([*lines, *(part for note in self.notes for part in ("", note))])

    def html(self) -> str:
        """Return the table for a notebook.

        >>> Table("t", "", ("a", "b"), [["<x>", "1"]]).html()
        '<table><tr><th>a</th><th>b</th></tr><tr><td>&lt;x&gt;</td><td>1</td></tr></table>'
        """
        lines = ["".join(f"<th>{escape(heading)}</th>" for heading in self.headings)]
        for i, row in enumerate(self.rows):
            cells = [f"<b>{escape(cell)}</b>" if i in self.bold and cell else escape(cell) for cell in row]
            lines.append("".join(f"<td>{cell}</td>" for cell in cells))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def csv(self) -> str:
        """Return the table for a spreadsheet."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue()

    def rich(self, *, wrap: bool = False) -> rich.table.Table:
        """Return the table for a terminal; with ``wrap``, numbers may be broken where it is narrow."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i, heading in enumerate(self.headings):
            text = self._is_text(heading)
            long = text and max((len(row[i]) for row in self.rows), default=0) > SHORT
            name, fixed = Text(heading), not (long or wrap)
            table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=fixed)
        for i, row in enumerate(self.rows):
            table.add_row(*(Text(cell, style="bold" if i in self.bold else "") for cell in row))
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return {"title": self.title, "headings": self.headings, "rows": self.rows, "notes": self.notes}

    def _is_text(self, heading: str) -> bool:
        return heading == self.headings[0] or heading in self.text_columns


def _piped(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sweep_table(choices: Sequence[Choice], select: str) -> Table:
    """Return what a sweep chose: two rows per method and problem, those chosen by ``select`` in bold."""
    order = [(choice.method, choice.problem) for choice in choices]
    rows = sorted(choices, key=lambda c: order.index((c.method, c.problem)))
    headings = ["method", "chosen by", "setting", "validation", "test", "round", "last 10", "budget"]
    noted = any(choice.notes for choice in rows)
    ladder = any(choice.finalists is not None for choice in rows)
    budget = "settings tried/run to the end/rounds of all runs" if ladder else "settings x seeds x rounds"
    return Table(
        "chosen",
        "",
        (*headings, *(["notes"] if noted else [])),
        [[*_choice_cells(choice), *(["; ".join(choice.notes)] if noted else [])] for choice in rows],
        [SWEEP_LEGEND.format(", ".join(dict.fromkeys(choice.metric.title for choice in rows)), budget)],
        frozenset(i for i, choice in enumerate(rows) if choice.by == select),
        frozenset({"chosen by", "setting", "notes"}),
    )


def _choice_cells(choice: Choice) -> list[str]:
    # Four digits are enough to recognize a setting; chosen.json has them all.
    chosen = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in (choice.settings or {}).items()}
    setting = " ".join(_setting(k, v) for k, v in chosen.items())
    return [
        " ".join([short_name(choice.method), *(_setting(k, v) for k, v in choice.problem.items())]),
        choice.by,
        "nothing can be chosen" if choice.settings is None else setting or "defaults",
        choice.metric.text(choice.validation),
        choice.metric.text(choice.test, choice.test_spread),
        "-" if choice.round is None else str(choice.round),
        choice.metric.text(choice.last10),
        choice.budget,
    ]


def _setting(key: str, value: Any) -> str:
    """Return a setting as text; code of the user's own by its name, without its file."""
    return f"{key}={show(short_name(value) if isinstance(value, str) else value)}"
