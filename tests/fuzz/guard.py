"""What no reader may do, whatever it reads: start a program, open a connection, or write outside its folder."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

_NEVER = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"),
    *("socket.connect", "ctypes."),
)
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "shutil.")
#: More address space than this, beyond what the process has at the start, is no honest wish of a small file.
ROOM = 2 << 30


class EscapedError(BaseException):
    """A reader did what it must not; no handler of errors takes it for damage."""


class Guard:
    """Watches this process while it is armed; a hook cannot be removed, so there is one for all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.armed = str(folder), False
        # Modules may be imported by the way, and Python keeps compiled ones beside them.
        self.readable = tuple({self.folder, sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc/self"})
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event.startswith(_NEVER):
            raise EscapedError(f"{event} {args}")
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path, writes = os.fsdecode(args[0]), args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            inside = os.path.abspath(path).startswith(self.folder if writes else self.readable)  # noqa: PTH100
            if not inside and not (writes and path.endswith(".pyc")) and "__pycache__" not in path:
                raise EscapedError(f"open {args}")
        if event.startswith(_CHANGES) and not os.path.abspath(os.fsdecode(args[0])).startswith(self.folder):  # noqa: PTH100
            raise EscapedError(f"{event} {args}")


def limit_memory() -> None:
    """Let this process have little more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
