"""Download one file over HTTP: resume an earlier attempt, and accept the file only if its md5 is right.

The progress bar also serves for decoding.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from feddpc.data.specs import Archive
from feddpc.data.untrusted import MAX_FILE_BYTES
from feddpc.errors import DataError

TIMEOUT = 20.0
_CHUNK = 1 << 20


def download(archive: Archive, folder: Path, *, timeout: float = TIMEOUT) -> Path:
    """Download ``archive`` into ``folder`` and return its path. A failed attempt leaves a ``.part`` file to resume."""
    target, part = folder / archive.file, folder / f"{archive.file}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and file_md5(target) == archive.md5:
            return target
        resumed = _transfer(archive, part, timeout)
        if resumed and file_md5(part) != archive.md5:
            part.unlink()  # the earlier part may belong to another file: start from the beginning
            _transfer(archive, part, timeout)
        actual = file_md5(part)
        if actual != archive.md5:
            part.unlink()
            raise DataError(f"{archive.url} sent a file with md5 {actual}, not {archive.md5}: it was deleted")
        part.replace(target)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataError(
            f"cannot download {archive.url} to {folder} ({str(error) or type(error).__name__}): run the command again "
            "to resume; if the disk is full, free some space or set FEDDPC_CACHE"
        ) from error
    return target


def file_md5(path: Path) -> str:
    """Return the md5 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _transfer(archive: Archive, part: Path, timeout: float) -> bool:
    """Append to ``part`` what it lacks, and return whether it already held something."""
    start = part.stat().st_size if part.is_file() else 0
    resumed = start > 0
    request = urllib.request.Request(archive.url, headers={"User-Agent": "feddpc"})
    if resumed:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not resumed:
            raise
        error.close()
        return True  # the part is at least as long as the file: its md5 decides whether it is the file
    with response:
        sent = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if response.status != http.HTTPStatus.PARTIAL_CONTENT or not sent or int(sent[1]) != start:
            start = 0  # the server ignored the range and sends the whole file
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        with (
            part.open("ab" if start else "wb") as file,
            progress_bar(archive.file, total, done=start, in_bytes=True) as advance,
        ):
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                advance(len(chunk))
                if file.tell() > MAX_FILE_BYTES:
                    raise DataError(
                        f"{archive.url} sends more than {MAX_FILE_BYTES >> 20} MB, more than any data set: stopped"
                    )
    received = part.stat().st_size
    if total is not None and received < total:
        raise ConnectionError(f"the connection broke after {received} of {total} bytes")
    return resumed


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
