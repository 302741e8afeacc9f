"""Limits on what an untrusted file may unpack to, and one error type for every way a decoder can fail.

Real data compress by a factor of about ten. A decompression bomb compresses by a factor of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
