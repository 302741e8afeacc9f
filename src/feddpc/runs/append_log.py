"""An append-only file of lines: a checkpoint says how much of it counts, and the checksum of that part."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from feddpc.errors import RunFolderError
from feddpc.storage import explain_os_errors


class LogMark(NamedTuple):
    """So many bytes, and their digest if it is known."""

    size: int = 0
    sha256: str | None = None


class AppendLog:
    """The lines of ``path`` up to ``mark``; records after it are truncated and will be written again."""

    def __init__(self, path: Path, mark: LogMark) -> None:
        self.path = path
        with explain_os_errors(path):
            if not mark.size:
                path.touch()
            if not path.exists() or path.stat().st_size < mark.size:
                raise RunFolderError(f"{path} is shorter than its checkpoint says: it was changed; start a new run")
            self._file = path.open("rb+", buffering=0)
            try:
                self._digest = hashlib.sha256(self._file.read(mark.size))
                if mark.sha256 not in (None, self._digest.hexdigest()):
                    raise RunFolderError(
                        f"{path} does not match its checksum: it was damaged; restore it or start a new run"
                    )
                self._file.truncate(mark.size)
                self._file.seek(mark.size)
            except BaseException:
                self._file.close()
                raise

    @property
    def mark(self) -> LogMark:
        """How much there is, for a checkpoint."""
        return LogMark(self._file.tell(), self._digest.hexdigest())

    def append(self, data: bytes) -> None:
        """Add whole lines; one torn by a full disk is cut off when the run is resumed."""
        with explain_os_errors(self.path.parent):
            left = memoryview(data)
            self._digest.update(left)
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Bring all of it to the disk."""
        with explain_os_errors(self.path.parent):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
