"""Headers of NumPy's array files, for checking their claims before memory is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np


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
