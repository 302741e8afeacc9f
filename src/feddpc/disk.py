"""Bringing what was written to the disk itself, so that it outlives a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
