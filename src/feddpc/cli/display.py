"""What a person sees while a run is going: a live bar on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from feddpc.run.config import Config

#: Seconds between two plain lines.
PLAIN_SECONDS = 2.0


class Display:
    """Shows the progress of one run after the other."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.live: Progress | None = None
        if console.is_terminal and not quiet:
            self.live = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
        self.task: TaskID | None = None
        self.label, self.rounds, self.best = "", 0, 0.0
        self.began = self.printed = self.first = 0.0

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()

    def begin(self, config: Config) -> None:
        """A run starts or goes on."""
        self.label = f"{config.method} seed {config.seed}"
        self.rounds, self.best = config.rounds, 0.0
        self.began = self.printed = time.monotonic()
        self.first = 0.0
        if self.live:
            self.task = self.live.add_task(f"{self.label:22}", total=config.rounds, state="")

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""
        if self.quiet:
            return
        done, accuracy = record["round"], record["test_accuracy"]
        self.best = max(self.best, accuracy or 0.0)
        state = f"accuracy {_percent(accuracy)}  best {_percent(self.best)}  loss {_number(record['train_loss'])}"
        if record.get("epsilon") is not None:
            state += f"  epsilon {record['epsilon']:.2f}"
        now = time.monotonic()
        if self.live and self.task is not None:
            self.live.update(self.task, completed=done, state=state)
        elif now - self.printed >= PLAIN_SECONDS or done == self.rounds:
            self.printed = now
            self.console.print(
                f"{self.label}  round {done}/{self.rounds}  {state}  {self._left(done, now)}", highlight=False
            )
        self.first = self.first or done

    def end(self, summary: dict[str, Any]) -> None:
        """A run has ended."""
        if summary["status"] != "finished" and not self.quiet:
            self.console.print(
                f"{self.label}: {summary['status']}, {summary['reason']}", style="yellow", highlight=False
            )

    def another(self) -> Display:
        """Return a display for a run beside this one; both share the terminal."""
        return copy.copy(self)

    def _left(self, done: int, now: float) -> str:
        made = done - (self.first or done) + 1
        return f"{(now - self.began) / made * (self.rounds - done):.0f} s left"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
