"""A disk that can stop at any moment: every call that changes a file below a folder is counted, and one is the last.

What the kernel keeps after a kill is what was written; what a machine keeps when its power fails is what was synced.
Both are played here with real files: a kill is a real SIGKILL, and before a power cut every file is put back to what
had been brought to the disk, as the calls of fsync tell.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save

#: What can happen at a call. A name of an error number raises that error once and goes on.
KILLS = ("kill before", "kill in the middle", "kill after")
CUTS = ("power cut", "power cut with names")
ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES")


class Disk:
    """Calls below ``folder`` are written down in ``calls``; at number ``last`` happens what ``end`` says."""

    def __init__(self, folder: Path, last: int = 0, end: str = "") -> None:
        self.folder, self.last, self.end = folder.resolve(), last, end
        self.calls: list[tuple[str, str]] = []
        self.synced = _Synced(self.folder)

    def install(self) -> None:
        """Put this disk in the place of the real one, for the rest of the process."""
        for name in ("mkdir", "rmdir", "unlink", "chmod"):
            self._wrap(os, name, lambda path, *_, **__: path)
        for name in ("replace", "rename"):
            self._wrap(os, name, lambda _, target, **__: target)
        self._wrap(os, "fsync", lambda handle: _path(handle), note=self.synced.note)
        self._wrap(os, "pwritev", lambda handle, *_: _path(handle), torn=_half_vector)
        self._replace_opens()

    def call(self, name: str, path: object, do: Callable[[], Any], torn: Callable[[], object] | None = None) -> Any:
        """Count a call that changes ``path``, and do it, or not, or half of it."""
        where = Path(os.fspath(path))  # type: ignore[call-overload]
        where = (Path.cwd() / where) if where.parent != Path() or where.exists() else self.folder / where
        if not where.is_relative_to(self.folder):
            return do()
        self.calls.append((name, str(where.relative_to(self.folder))))
        if len(self.calls) != self.last:
            return do()
        if self.end in ERRORS:
            number = getattr(errno, self.end)
            raise OSError(number, os.strerror(number), str(where))
        with suppress(OSError):  # a folder that was there before
            if self.end == "kill in the middle" and torn is not None:
                torn()
            elif self.end in ("kill after", *CUTS):
                do()
        if self.end in CUTS:
            self.synced.restore(names_kept=self.end == CUTS[1])
        os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(
        self,
        module: Any,
        name: str,
        path: Callable[..., object],
        torn: Callable[..., object] | None = None,
        note: Callable[..., object] | None = None,
    ) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            half = (lambda: torn(real, *args, **more)) if torn else None
            result = self.call(name, path(*args, **more), lambda: real(*args, **more), half)
            if note is not None:
                note(*args)
            return result

        setattr(module, name, wrapped)

    def _replace_opens(self) -> None:
        disk, real_open, real_os_open = self, io.open, os.open

        class Counted(io.FileIO):
            def __init__(self, file: Any, mode: str = "r") -> None:
                make = "w" in mode or not Path(file).exists()
                disk.call("open", file, lambda: None) if make else None
                super().__init__(file, mode)
                if make:
                    disk.synced.made(self.fileno())

            def write(self, data: Any, /) -> int:
                half = bytes(data)[: len(data) // 2]
                return disk.call("write", self.name, lambda: super(Counted, self).write(data), lambda: self.put(half))

            def put(self, data: bytes) -> None:
                super().write(data)

            def truncate(self, size: int | None = None, /) -> int:
                return disk.call("truncate", self.name, lambda: super(Counted, self).truncate(size))

        def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+") or isinstance(file, int) or "/dev/" in str(file):
                return real_open(file, mode, buffering, *args, **more)
            raw = Counted(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            whole = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return whole if "b" in mode else io.TextIOWrapper(whole, *args, **more)

        def os_opened(path: Any, flags: int, *args: Any, **more: Any) -> int:
            if not flags & os.O_CREAT or Path(path).exists():
                return real_os_open(path, flags, *args, **more)
            handle: int = disk.call("open", path, lambda: real_os_open(path, flags, *args, **more))
            disk.synced.made(handle)
            return handle

        def save_file(tensors: Any, path: Any, metadata: Any = None) -> None:
            with opened(path, "wb") as file:
                file.write(save(tensors, metadata))

        import feddpc.round.row_storage
        import feddpc.runs.checkpoint

        io.open, os.open = opened, os_opened  # type: ignore[assignment]
        feddpc.round.row_storage.FileIO = Counted  # type: ignore[misc]
        feddpc.runs.checkpoint.save_file = save_file  # in Rust, otherwise: no call of Python's


class _Synced:
    """What a power cut leaves: names as they were when their folder was synced, content as when the file was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[Path, dict[str, tuple[int, int]]] = {}  # by folder
        self.content: dict[tuple[int, int], bytes] = {}  # by number and generation, because numbers are used again
        self.generation: dict[int, int] = {}

    def made(self, handle: int) -> None:
        number = os.fstat(handle).st_ino
        self.generation[number] = self.generation.get(number, 0) + 1

    def note(self, handle: int) -> None:
        path = Path(_path(handle))
        if path.is_dir():
            self.names[path] = {p.name: self._key(p) for p in path.iterdir()}
        else:
            self.content[self._key(path)] = path.read_bytes()

    def restore(self, *, names_kept: bool) -> None:
        """Put the folder into the state in which it would be found."""
        parent = self.names.get(self.folder.parent, {})
        found = names_kept or self.folder.name in parent
        files = dict(self._below(self.folder, names_kept)) if found else {}
        shutil.rmtree(self.folder, ignore_errors=True)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _below(self, folder: Path, names_kept: bool) -> Any:
        now = {p.name: self._key(p) for p in folder.iterdir()} if folder.is_dir() else {}
        for name, key in (now if names_kept else self.names.get(folder, {})).items():
            if (folder / name).is_dir():
                yield from self._below(folder / name, names_kept)
            else:
                yield folder / name, self.content.get(key, b"")

    def _key(self, path: Path) -> tuple[int, int]:
        number = path.stat().st_ino
        return number, self.generation.get(number, 0)


def _path(handle: int) -> str:
    return str(Path(f"/proc/self/fd/{handle}").readlink())


def _half_vector(real: Callable[..., int], handle: int, buffers: Any, offset: int) -> None:
    (data,) = buffers
    real(handle, [data[: len(data) // 2]], offset)
