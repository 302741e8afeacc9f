"""Reading files that may come from anyone: limits on what they unpack to, headers of arrays, and ``.npz`` data sets.

Real data compress by a factor of about ten. A decompression bomb compresses by a factor of a thousand. Every way in
which a decoder can fail becomes one type of error.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from feddpc.data.array_checks import Target
from feddpc.data.dataset import FIELDS, Dataset
from feddpc.errors import DataError, FeddpcError

#: No file of a known data set is this large, compressed or not.
MAX_FILE_BYTES = 1 << 30
#: Any file may unpack to ``BASE_BYTES``, plus ``MAX_RATIO`` times its own size.
BASE_BYTES, MAX_RATIO = 64 << 20, 200


def max_unpacked_bytes(packed: int) -> int:
    """Return how many bytes a file of ``packed`` bytes may unpack to.

    >>> max_unpacked_bytes(1 << 20) >> 20
    264
    """
    return BASE_BYTES + MAX_RATIO * packed


def check_unpacked_size(where: object, packed: int, unpacked: int) -> None:
    """Raise DataError if ``unpacked`` bytes are more than ``packed`` bytes of real data can hold."""
    if unpacked > max_unpacked_bytes(packed):
        raise DataError(
            f"{where} unpacks to more than {max_unpacked_bytes(packed) >> 20} MB from {packed} bytes, as no real data "
            "set does: refused; if the file is your own, store it with less compression"
        )


@contextmanager
def decoding_errors(message: str) -> Iterator[None]:
    """Turn every exception of a decoder into a DataError that starts with ``message``."""
    try:
        yield
    except FeddpcError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in a decoder, with almost any exception
        raise DataError(f"{message} ({type(error).__name__}: {str(error)[:200]})") from error


class Header(NamedTuple):
    """Shape, order and type that an array file claims to hold."""

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype[Any]

    @property
    def numbers(self) -> int:
        """How many numbers the array has."""
        return int(np.prod(self.shape, dtype=object))

    def fills(self, size: int) -> bool:
        """Whether plain numbers of this shape and type fill ``size`` bytes exactly."""
        plain = not self.dtype.hasobject and self.dtype.itemsize > 0 and min(self.shape, default=0) >= 0
        return plain and self.numbers * self.dtype.itemsize == size


def read_header(stream: IO[bytes]) -> Header:
    """Read a header. NumPy parses it as Python text, and its parsers can raise almost any exception.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.zeros((2, 3), np.float32))
    >>> _ = file.seek(0)
    >>> read_header(file)
    Header(shape=(2, 3), by_columns=False, dtype=dtype('float32'))
    """
    read: Callable[..., tuple[tuple[int, ...], bool, np.dtype[Any]]] = (
        np.lib.format.read_array_header_1_0
        if np.lib.format.read_magic(stream) == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    return Header(*read(stream))


def read_npz(path: Path, *, target: Target | None = None) -> Dataset:
    """Read a file with the arrays x_train, y_train, x_test and y_test, and client_ids if the data have clients.

    Object arrays are refused, because loading one runs code from the file. ``target`` is that of
    :meth:`Dataset.from_arrays`.
    """
    with decoding_errors(f"{path} is not a readable .npz file of plain arrays"), zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        check_unpacked_size(path, path.stat().st_size, sum(member.file_size for member in members.values()))
        missing = [field for field in FIELDS if field not in members]
        if missing:
            present = ", ".join(members) or "nothing"
            raise DataError(f"{path} lacks {', '.join(missing)} (it holds {present}): save all of {', '.join(FIELDS)}")
        wanted = [field for field in (*FIELDS, "client_ids") if field in members]
        arrays = {f: _read_array(archive, members[f]) for f in wanted}
        return Dataset.from_arrays(**arrays, name=path.stem, target=target)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    """Read one array, after checking that it has the size that its header claims."""
    with archive.open(member) as stream:
        header = read_header(stream)
        if not header.fills(member.file_size - stream.tell()):
            raise ValueError(f"{member.filename} has {member.file_size} bytes, but its header claims {header}")
        values = np.frombuffer(stream.read(), header.dtype)
        return values.reshape(header.shape, order="F" if header.by_columns else "C").copy()
