"""The display of the command line, for runs that are started from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console

from feddpc.config import Config
from feddpc.report.display import Display
from feddpc.runs.runner import OnRound


def make_display(progress: bool) -> Display | None:
    """Return a display on standard error if one is asked for."""
    return Display(Console(stderr=True)) if progress else None


class _Followed:
    """Shows one run, and passes its records on."""

    def __init__(self, display: Display | None, on_round: OnRound | None) -> None:
        self.display, self.on_round = display, on_round

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""
        if self.display:
            self.display.round(record)
        if self.on_round:
            self.on_round(record)

    def end(self, summary: dict[str, Any]) -> None:
        """The run has ended."""
        if self.display:
            self.display.end(summary)


@contextmanager
def following(progress: bool, config: Config, on_round: OnRound | None) -> Iterator[_Followed]:
    """Show the progress of one run if asked to, and tell ``on_round`` of every round."""
    display = make_display(progress)
    with display or nullcontext():
        if display:
            display.begin(config)
        yield _Followed(display, on_round)
