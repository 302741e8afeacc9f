"""A table as text, written once and shown three ways: on a terminal, in Markdown, in a spreadsheet."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Sheet:
    """Headings and rows of cells; the first column is text, the others are figures unless named in ``wordy``."""

    name: str  #: of its file
    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    strong: frozenset[int] = frozenset()  #: rows to set off
    wordy: frozenset[str] = frozenset()

    def markdown(self) -> str:
        """Return the table for a document, notes below.

        >>> print(Sheet("t", "T", ("a", "b"), [["x", "1"]], ["Note."], strong=frozenset({0})).markdown())
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
            lines.append(_piped([f"**{cell}**" if i in self.strong and cell else cell for cell in row]))
        return "\n".join([*lines, *(part for note in self.notes for part in ("", note))])

    def csv(self) -> str:
        """Return the table for a spreadsheet."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue()

    def rich(self) -> Table:
        """Return the table for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in self.headings:
            text = self._is_text(heading)
            table.add_column(heading, justify="left" if text else "right", overflow="fold", no_wrap=not text)
        for i, row in enumerate(self.rows):
            table.add_row(*(Text(cell, style="bold" if i in self.strong else "") for cell in row))
        return table

    def _is_text(self, heading: str) -> bool:
        return heading == self.headings[0] or heading in self.wordy


def _piped(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
