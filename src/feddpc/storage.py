"""Writing that survives a crash: a file is either the old one or the new one, never a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from safetensors import SafetensorError

from feddpc.errors import unusable

_unsynced: ContextVar[bool] = ContextVar("unsynced", default=False)


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an operating-system error about ``path`` into one that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the system's error in one of its own, with the number in the text.
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC if "os error 28" in str(error) else None
        reason = error.strerror if isinstance(error, OSError) else None
        raise unusable(path, number, reason or error) from error


@contextmanager
def without_sync() -> Iterator[None]:
    """Within, files are replaced at once as ever, but the system may bring them to the disk when it likes.

    A process that is killed loses nothing by that; a machine without power may, so what is read back must be checked.
    """
    before = _unsynced.set(True)
    try:
        yield
    finally:
        _unsynced.reset(before)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, bring it to the disk, then put it in place at once."""
    temporary = path.with_name(f".{path.name}.part")
    with explain_os_errors(path):
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # libraries write with modes of their own
            if _unsynced.get():
                temporary.replace(path)
                return
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file all at once."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, whose names are then on the disk as well; one that is there is kept."""
    with explain_os_errors(path):
        missing = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path, *missing):
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system can, and unless within :func:`without_sync`."""
    if _unsynced.get() or os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())
