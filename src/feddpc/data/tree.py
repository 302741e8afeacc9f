"""One view of the files in a folder, a zip or a tar: listed by name, read one by one, never extracted to disk.

Archives come from the network, so their members are not trusted: absolute names, ``..`` and links are refused, and a
member larger than any real one is not read into memory.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from feddpc.errors import DataError

LARGEST_MEMBER = 1 << 30
_GZIP, _ZIP = b"\x1f\x8b", b"PK"


class Tree(ABC):
    """The files below ``path``, with names relative to it and ``/`` between their parts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """List every regular file, sorted."""

    @abstractmethod
    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield ``(name, content)`` of the wanted files, in whichever order reads fastest."""


def open_tree(path: Path) -> Tree:
    """Open a folder, a zip, or a tar (plain or gzipped), whichever ``path`` is by its content, not its name."""
    if path.is_dir():
        return _Folder(path)
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return _Zip(path) if head == _ZIP else _Tar(path)


class _Folder(Tree):
    def names(self) -> list[str]:
        found: list[str] = []
        for folder, _, files in os.walk(self.path):
            base = Path(folder).relative_to(self.path)
            found += [(base / file).as_posix() for file in files]
        return sorted(found)

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        for name in wanted:
            try:
                yield name, (self.path / name).read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error


class _Zip(Tree):
    def names(self) -> list[str]:
        with _damage_as_error(self.path), zipfile.ZipFile(self.path) as archive:
            return sorted(_checked(self.path, info.filename) for info in archive.infolist() if not info.is_dir())

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        with _damage_as_error(self.path), zipfile.ZipFile(self.path) as archive:
            for name in wanted:
                info = archive.getinfo(name)
                _check_size(self.path, name, info.file_size)
                yield name, archive.read(info)


class _Tar(Tree):
    def names(self) -> list[str]:
        return sorted(member.name for _, member in self._members())

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        keep = frozenset(wanted)
        for archive, member in self._members():
            if member.name in keep:
                _check_size(self.path, member.name, member.size)
                file = archive.extractfile(member)
                assert file is not None  # _members yields regular files only
                with _damage_as_error(self.path):
                    content = file.read()
                yield member.name, content

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        """Walk the archive once, front to back: a gzipped tar would be unpacked again for every step back."""
        with _damage_as_error(self.path), self.path.open("rb") as raw:
            gzipped = raw.read(2) == _GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if gzipped else raw
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    _checked(self.path, member.name)
                    if member.islnk() or member.issym():
                        raise DataError(
                            f"{self.path}: member {member.name!r} is a link, which no known data set has: refused"
                        )
                    if member.isfile():
                        yield archive, member
            # tarfile stops at its own end mark; gzip verifies its checksum only at the end of the stream.
            while stream.read(1 << 20):
                pass


def _checked(path: Path, name: str) -> str:
    posix = name.replace("\\", "/")
    if posix.startswith("/") or ".." in PurePosixPath(posix).parts or ":" in posix.split("/")[0]:
        raise DataError(f"{path}: member {name!r} points outside the archive: refused")
    return name


def _check_size(path: Path, name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise DataError(f"{path}: member {name!r} claims {size} bytes, more than any known data set's file: refused")


@contextmanager
def _damage_as_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
    ) as error:
        raise DataError(f"{path} is damaged, truncated or not an archive ({error}): get it again") from error
