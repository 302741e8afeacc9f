"""What a person sees while a run is going: a live bar on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from feddpc.registry import short_name
from feddpc.tasks.metrics import METRICS, Metric, primary_name

if TYPE_CHECKING:
    from feddpc.config import Config
    from feddpc.study import Progress as Runs

#: Seconds between two plain lines.
PLAIN_SECONDS = 2.0


class Display:
    """Shows the progress of one run after the other."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.live = _bar(console) if console.is_terminal and not quiet else None
        self.task: TaskID | None = None
        self.label, self.rounds = "", 0
        self.best: float | None = None
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
        self.label = f"{short_name(config.method)} seed {config.seed}"
        self.rounds, self.best = config.rounds, None
        self.began = self.printed = time.monotonic()
        self.first = 0.0
        if self.live:
            self.task = self.live.add_task(f"{self.label:22}", total=config.rounds, state="")

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""
        if self.quiet:
            return
        done, name = record["round"], primary_name(record)
        metric = METRICS.get(name, Metric(name))
        value = record.get(metric.key())
        self.best = metric.pick([known for known in (self.best, value) if known is not None])
        state = f"{metric.words} {metric.with_unit(value)}"
        if name in METRICS:  # else the direction is not known here
            state += f"  best {metric.with_unit(self.best)}"
        state += f"  loss {_number(record['train_loss'])}"
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


class Many:
    """Shows the progress of many runs at once: one bar over all their rounds, or a plain line now and then."""

    def __init__(self, console: Console, label: str, *, quiet: bool = False) -> None:
        self.console, self.label, self.quiet = console, label, quiet
        self.live = _bar(console) if console.is_terminal and not quiet else None
        self.task: TaskID | None = None
        self.began = self.printed = time.monotonic()
        self.first: int | None = None

    def __enter__(self) -> Many:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, now: Runs) -> None:
        """Show how far it is."""
        self.first = now.rounds if self.first is None else self.first
        state = f"{now.ended}/{now.total} runs" + (f", {now.failed} failed" if now.failed else "")
        if self.live:
            if self.task is None:
                self.task = self.live.add_task(self.label, total=now.all_rounds, state=state)
            self.live.update(self.task, completed=now.rounds, total=now.all_rounds, state=state)
        elif not self.quiet and (time.monotonic() - self.printed >= PLAIN_SECONDS or now.ended == now.total):
            self.printed = time.monotonic()
            made = now.rounds - self.first
            left = (self.printed - self.began) / made * (now.all_rounds - now.rounds) if made else None
            about = "" if left is None else f"  {left:.0f} s left"
            line = f"{self.label}  {state}  round {now.rounds}/{now.all_rounds}{about}"
            self.console.print(line, highlight=False, markup=False)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
