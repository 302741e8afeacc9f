"""What a person sees while a run is going: a live bar on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from feddpc.registry import short_name
from feddpc.tasks.metrics import METRICS, Metric, primary_name

if TYPE_CHECKING:
    from feddpc.config import Config
    from feddpc.study import Progress as Runs

#: Seconds between two plain lines.
PLAIN_SECONDS = 2.0


def make_display(wanted: bool) -> Display | None:
    """Return a display on standard error if one is wanted."""
    return Display(Console(stderr=True)) if wanted else None


def make_reading(wanted: bool, total: int) -> Reading | None:
    """Return what shows on standard error that so many samples are read, if that is wanted."""
    return Reading(Console(stderr=True), total) if wanted else None


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print text as it is: rich neither colors numbers nor reads brackets as markup."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


class _Shown:
    """A bar on a terminal, a plain line now and then elsewhere, nothing if quiet."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.live = _bar(console) if console.is_terminal and not quiet else None
        self.task: TaskID | None = None
        self.first: int | None = None  #: rounds that were there at the beginning
        self.began = self.printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()

    def _print_line(self, text: str, done: int, total: int, *, last: bool) -> None:
        """Print a line with the seconds that are left, every PLAIN_SECONDS and at the end."""
        now = time.monotonic()
        if self.quiet or (now - self.printed < PLAIN_SECONDS and not last):
            return
        self.printed = now
        made = done - (self.first or 0)
        left = f"  {(now - self.began) / made * (total - done):.0f} s left" if made else ""
        print_line(self.console, text + left)


class Display(_Shown):
    """Shows the progress of one run after the other."""

    label, rounds = "", 0
    best: float | None = None

    def begin(self, config: Config) -> None:
        """A run starts or continues."""
        self.label = f"{short_name(config.method)} seed {config.seed}"
        self.rounds, self.best, self.first = config.rounds, None, None
        self.began = self.printed = time.monotonic()
        if self.live:
            self.task = self.live.add_task(f"{self.label:22}", total=config.rounds, state="")

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""
        done, name = record["round"], primary_name(record)
        self.first = done - 1 if self.first is None else self.first
        metric = METRICS.get(name, Metric(name))
        value = record.get(metric.key())
        self.best = metric.pick([known for known in (self.best, value) if known is not None])
        state = f"{metric.words} {metric.with_unit(value)}"
        if name in METRICS:  # else the direction is not known here
            state += f"  best {metric.with_unit(self.best)}"
        state += f"  loss {_number(record['train_loss'])}"
        if record.get("epsilon") is not None:
            state += f"  epsilon {record['epsilon']:.2f}"
        if self.live and self.task is not None:
            self.live.update(self.task, completed=done, state=state)
        else:
            text = f"{self.label}  round {done}/{self.rounds}  {state}"
            self._print_line(text, done, self.rounds, last=done == self.rounds)

    def end(self, summary: dict[str, Any]) -> None:
        """A run has ended."""
        if summary["status"] != "finished" and not self.quiet:
            print_line(self.console, f"{self.label}: {summary['status']}, {summary['reason']}", style="yellow")

    def another(self) -> Display:
        """Return a display for another run at the same time; both share the terminal."""
        return copy.copy(self)


class Reading(_Shown):
    """Shows how many samples of a data set have been read; it is called with the number of new ones."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console)
        self.done, self.total = 0, total
        if self.live:
            self.task = self.live.add_task("reading data", total=total, state="samples")

    def __call__(self, samples: int) -> None:
        """Show that so many more were read."""
        self.done += samples
        if self.live and self.task is not None:
            self.live.update(self.task, completed=self.done)
        else:
            text = f"reading data  sample {self.done}/{self.total}"
            self._print_line(text, self.done, self.total, last=self.done == self.total)


class Many(_Shown):
    """Shows the progress of many runs at once: one bar over all their rounds, or a plain line now and then."""

    def __init__(self, console: Console, label: str, *, quiet: bool = False) -> None:
        super().__init__(console, quiet=quiet)
        self.label = label

    def __call__(self, now: Runs) -> None:
        """Show how far it is."""
        self.first = now.rounds if self.first is None else self.first
        state = f"{now.ended}/{now.total} runs" + (f", {now.failed} failed" if now.failed else "")
        if self.live:
            if self.task is None:
                self.task = self.live.add_task(self.label, total=now.all_rounds, state=state)
            self.live.update(self.task, completed=now.rounds, total=now.all_rounds, state=state)
        else:
            text = f"{self.label}  {state}  round {now.rounds}/{now.all_rounds}"
            self._print_line(text, now.rounds, now.all_rounds, last=now.ended == now.total)


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
