"""The table of a sweep: what was chosen for every method, how, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from feddpc.report.groups import show
from feddpc.report.tables import percent
from feddpc.study.choose import Choice

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "Accuracies in %, mean over seeds ± sample standard deviation. test: for a setting chosen by validation in the "
    "round that validation data choose, for one chosen by test the highest of any round, which flatters. budget: "
    "settings x seeds x rounds."
)


def rich_table(choices: Sequence[Choice], select: str) -> Table:
    """Return the table for a terminal: two lines a method, what was chosen by ``select`` in bold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    table.add_column("chosen by", no_wrap=True)
    table.add_column("setting", overflow="fold")
    for heading in ("validation", "test", "round", "last 10"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("budget", no_wrap=True)
    noted = any(_lost(choice) for choice in choices)
    if noted:
        table.add_column("notes", overflow="fold")
    order = [(choice.method, choice.problem) for choice in choices]
    for choice in sorted(choices, key=lambda c: order.index((c.method, c.problem))):
        cells = [*_cells(choice), *([_lost(choice)] if noted else [])]
        table.add_row(*(Text(cell, style="bold" if choice.by == select else "") for cell in cells))
    return table


def _cells(choice: Choice) -> list[str]:
    # Four digits are enough to recognise a setting; chosen.json has them all.
    chosen = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in (choice.settings or {}).items()}
    setting = " ".join(f"{k}={show(v)}" for k, v in chosen.items())
    return [
        " ".join([choice.method, *(f"{k}={show(v)}" for k, v in choice.problem.items())]),
        choice.by,
        "nothing can be chosen" if choice.settings is None else setting or "as it is",
        percent(choice.validation_accuracy),
        percent(choice.test_accuracy, choice.test_spread),
        "-" if choice.round is None else str(choice.round),
        percent(choice.last10_accuracy),
        f"{choice.count}x{choice.seeds}x{choice.rounds}",
    ]


def _lost(choice: Choice) -> str:
    """Say which settings could not be chosen."""
    counts = {"diverged": choice.diverged, "failed": choice.failed, "missing": choice.missing}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
