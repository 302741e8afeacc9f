"""List and read the files of a folder, a zip or a tar (plain or gzipped) without extracting anything to disk.

Archives come from the network, so their members are not trusted. Absolute names, ``..``, links and duplicate names are
refused. A member that is larger than any real data file, or that is compressed too tightly, is not read into memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from feddpc.data.untrusted import MAX_FILE_BYTES, check_unpacked_size, decoding_errors
from feddpc.errors import DataError

#: The name of a file, its size in bytes, and a function that returns its content.
Member = tuple[str, int, Callable[[], bytes]]
_GZIP, _ZIP = b"\x1f\x8b", b"PK"


def list_files(path: Path) -> list[str]:
    """Return the names of all regular files below ``path``, sorted, with ``/`` between their parts."""
    names = sorted(name for name, _, _ in _members(path))
    for name in () if path.is_dir() else names:
        posix = name.replace("\\", "/")
        if posix.startswith("/") or ".." in PurePosixPath(posix).parts or ":" in posix.split("/")[0]:
            raise DataError(f"{path}: member {name!r} points outside the archive: refused")
    for name, following in itertools.pairwise(names):
        if name == following:
            raise DataError(f"{path}: two members have the name {name!r}, so the content is ambiguous: refused")
    return names


def read_files(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield ``(name, content)`` of the wanted files, in the order in which the archive stores them."""
    keep, unpacked = frozenset(wanted), 0
    for name, size, read in _members(path):
        if name in keep:
            if size > MAX_FILE_BYTES:
                raise DataError(f"{path}: {name!r} has {size} bytes, more than any file of a data set: refused")
            unpacked += size
            if path.is_file():
                check_unpacked_size(path, path.stat().st_size, unpacked)
            with _read_errors(path):
                content = read()
            yield name, content


def _members(path: Path) -> Iterator[Member]:
    """Walk all regular files once. The kind of archive is recognized by its content, not by its name."""
    with _read_errors(path):
        if path.is_dir():
            yield from _folder_members(path)
            return
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            if magic == _ZIP:
                yield from _zip_members(path, file)
            else:
                yield from _tar_members(path, gzip.GzipFile(fileobj=file) if magic == _GZIP else file)


def _read_errors(path: Path) -> AbstractContextManager[None]:
    return decoding_errors(f"cannot read {path}: it is damaged, truncated or not an archive; get it again")


def _folder_members(path: Path) -> Iterator[Member]:
    for folder, _, files in os.walk(path):
        for file in files:
            inner = Path(folder) / file
            # Pipes and devices are left out, also behind a link: their content has no end.
            if inner.is_file():
                yield inner.relative_to(path).as_posix(), inner.stat().st_size, inner.read_bytes


def _zip_members(path: Path, file: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"{path}: {info.filename!r} uses an unusual compression: refused; use deflate")
            if not info.is_dir():
                yield info.filename, info.file_size, partial(archive.read, info)


def _tar_members(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[Member]:
    # One pass from front to back: a gzipped tar would be unpacked again for every step back.
    stream = _LimitedReader(file, path)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            if member.islnk() or member.issym() or member.issparse():
                kind = "sparse" if member.issparse() else "a link"
                raise DataError(f"{path}: member {member.name!r} is {kind}, which no known data set has: refused")
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, member.size, content.read
    # tarfile stops at its own end mark, but gzip verifies its checksum only at the end of the stream.
    while stream.read(1 << 20):
        pass


class _LimitedReader(io.BufferedIOBase):
    """A stream for tarfile that raises where a file of this size unpacks to more than real data."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, path: Path) -> None:
        self._stream, self._path, self._packed = stream, path, path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None, "tarfile always gives a size"
        check_unpacked_size(self._path, self._packed, self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        check_unpacked_size(self._path, self._packed, position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()
