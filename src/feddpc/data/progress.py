"""A progress bar where somebody watches, and nothing where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(
    text: str, total: int | None, *, done: int = 0, show: bool | None = None, size: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``; draws on standard error if ``show``, or if ``show`` is None and that is a terminal.

    ``size`` counts bytes and adds a speed; ``done`` is what an earlier attempt had already finished.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (DownloadColumn(), Speed()) if size else (MofNCompleteColumn(),)
    layout = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*layout, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total, completed=done)
        yield lambda n: progress.advance(task, n)
