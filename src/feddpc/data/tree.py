"""One view of the files in a folder, a zip or a tar: listed by name, read one by one, never extracted to disk.

Archives come from the network, so their members are not trusted: absolute names, ``..``, links and names that are
there twice are refused, and a member larger than any real one, or packed more tightly, is not read into memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

from feddpc.data.limits import LARGEST_MEMBER, check_growth, damage_as_error
from feddpc.errors import DataError

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
            # Neither pipes nor devices, also behind a link: their content has no end.
            found += [(base / file).as_posix() for file in files if (Path(folder) / file).is_file()]
        return sorted(found)

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        for name in wanted:
            try:
                _check_size(self.path, name, (self.path / name).stat().st_size)
                yield name, (self.path / name).read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error


class _Zip(Tree):
    def names(self) -> list[str]:
        with _damage_as_error(self.path), zipfile.ZipFile(self.path) as archive:
            return _checked(self.path, (info.filename for info in archive.infolist() if not info.is_dir()))

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        unpacked, packed = 0, self.path.stat().st_size
        with _damage_as_error(self.path), zipfile.ZipFile(self.path) as archive:
            for name in wanted:
                info = archive.getinfo(name)
                _check_size(self.path, name, info.file_size)
                unpacked += info.file_size
                check_growth(self.path, packed, unpacked)
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DataError(f"{self.path}: member {name!r} is packed in an unusual way: refused; pack it anew")
                yield name, archive.read(info)


class _Tar(Tree):
    def names(self) -> list[str]:
        return _checked(self.path, (member.name for _, member in self._members()))

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
            stream = _Measured(gzip.GzipFile(fileobj=raw) if gzipped else raw, self.path)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    if member.islnk() or member.issym() or member.issparse():
                        kind = "sparse" if member.issparse() else "a link"
                        raise DataError(
                            f"{self.path}: member {member.name!r} is {kind}, which no known data set has: refused"
                        )
                    if member.isfile():
                        yield archive, member
            # tarfile stops at its own end mark; gzip verifies its checksum only at the end of the stream.
            while stream.read(1 << 20):
                pass


class _Measured(io.BufferedIOBase):
    """A stream for tarfile that is not read further than a file of its size can reasonably unpack to."""

    def __init__(self, stream: io.BufferedIOBase, path: Path) -> None:
        self._stream, self._path, self._packed = stream, path, path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None, "tarfile always says how much"
        check_growth(self._path, self._packed, self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        check_growth(self._path, self._packed, position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()


def _checked(path: Path, names: Iterable[str]) -> list[str]:
    """Return the names of an archive's members, sorted; one that is a way out of it, or is there twice, is an error."""
    found = sorted(names)
    for name in found:
        posix = name.replace("\\", "/")
        if posix.startswith("/") or ".." in PurePosixPath(posix).parts or ":" in posix.split("/")[0]:
            raise DataError(f"{path}: member {name!r} points outside the archive: refused")
    for name, following in itertools.pairwise(found):
        if name == following:
            raise DataError(f"{path}: member {name!r} is there twice: refused, because it is unclear which is meant")
    return found


def _check_size(path: Path, name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise DataError(f"{path}: member {name!r} claims {size} bytes, more than any known data set's file: refused")


def _damage_as_error(path: Path) -> AbstractContextManager[None]:
    return damage_as_error(f"{path} is damaged, truncated or not an archive: get it again")
