"""Who works on what: one small file an item, so that several sweeps on one folder share the work.

A claim says who made it, and its file is touched while its owner lives. A claim is void when its owner is gone: on this
machine that is looked up, from another machine it is believed after a minute without a sign of life.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddpc.storage import explain_os_errors

#: Seconds between two signs of life, and without one after which a claim from another machine is void.
BEAT, GONE = 5.0, 60.0


class Claims:
    """The claims of one sweep in its folder; leaving the context gives them all back."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "claims"
        self.token = uuid.uuid4().hex
        self.held: set[str] = set()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="claims of a sweep", daemon=True)

    def __enter__(self) -> Claims:
        with explain_os_errors(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
        self._heart.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._heart.join()
        for key in list(self.held):
            self.release(key)

    def take(self, key: str) -> bool:
        """Claim an item; False if somebody who lives has it."""
        path = self.path(key)
        with locked(self.place), explain_os_errors(path):
            if self._is_taken(path):
                return False
            note = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid()), "token": self.token}
            fresh = path.with_suffix(f".{self.token}")
            fresh.write_text(json.dumps(note) + "\n", encoding="utf-8")
            fresh.replace(path)
        self.held.add(key)
        return True

    def release(self, key: str) -> None:
        """Give an item back."""
        self.held.discard(key)
        with locked(self.place), explain_os_errors(self.place):
            if _read(self.path(key)).get("token") == self.token:
                self.path(key).unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """Return the file of a claim."""
        return self.place / f"{key}.json"

    def _is_taken(self, path: Path) -> bool:
        try:
            sign = path.stat().st_mtime
        except FileNotFoundError:
            return False
        note = _read(path)
        if note.get("host") == socket.gethostname() and os.name == "posix":
            pid = note.get("pid")
            return isinstance(pid, int) and is_alive(pid, note.get("began"))
        # The folder's own clock, because that of another machine may be wrong.
        clock = self.place / f".clock-{self.token}"
        clock.touch()
        try:
            return clock.stat().st_mtime - sign < GONE
        finally:
            clock.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            for key in list(self.held):
                try:
                    os.utime(self.path(key))
                except OSError:  # given back just now, or a file system that stumbles: the next beat will tell
                    continue


def holds(folder: Path, key: str, token: str) -> bool:
    """Say whether ``folder``, as this machine sees it, is the one in which ``token`` has claimed ``key``."""
    return _read(folder / "claims" / f"{key}.json").get("token") == token


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Be alone in ``place`` for a moment, where the system has locks."""
    with explain_os_errors(place):
        handle = (place / ".lock").open("wb")
    with handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # a file system without locks: claims themselves are still made at one go
        yield


def is_alive(pid: int, began: int | None = None) -> bool:
    """Say whether a process of this machine lives, and is the one that ``began`` then and not a later one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = _began(pid)
    return pid > 0 and now != 0 and (began is None or now is None or now == began)


def _began(pid: int) -> int | None:
    """Return when a process began, in ticks since the start of the machine; 0 for a dead one, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def _read(path: Path) -> dict[str, Any]:
    """Return what a claim says; nothing if it cannot be read."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}
