"""A progress bar for long downloads and decoding, drawn only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    text: str, total: int | None, *, done: int = 0, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``, and draw on standard error if that is a terminal.

    ``in_bytes`` adds a transfer rate; ``done`` is what an earlier attempt already finished.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (DownloadColumn(), Speed()) if in_bytes else (MofNCompleteColumn(),)
    layout = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*layout, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total, completed=done)
        yield lambda n: progress.advance(task, n)
