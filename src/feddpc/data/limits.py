"""What reading a foreign file may cost: a bound on what it unpacks to, and one kind of error for all that can go wrong.

Real data shrink by a factor of ten or so when they are packed; a bomb shrinks a thousandfold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from feddpc.errors import DataError, FeddpcError

#: No file of a known data set is as large, packed or not.
LARGEST_MEMBER = 1 << 30
#: Any file may unpack to this much, and beyond it to so many times its own size.
FREE, TIMES = 64 << 20, 200


def most(packed: int) -> int:
    """Return how many bytes may come out of ``packed`` ones.

    >>> most(1 << 20) >> 20
    264
    """
    return FREE + TIMES * packed


def check_growth(where: object, packed: int, unpacked: int) -> None:
    """Refuse a file that unpacks to more than any real one of its size."""
    if unpacked > most(packed):
        raise DataError(
            f"{where} unpacks to more than {most(packed) >> 20} MB from {packed} bytes: it is no real data, refused; "
            "if it is yours, store it less packed"
        )


@contextmanager
def damage_as_error(what: str) -> Iterator[None]:
    """Turn whatever a reader trips over into the declared error; ``what`` says what the file is not."""
    try:
        yield
    except FeddpcError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in a decoder, with almost any exception
        raise DataError(f"{what} ({type(error).__name__}: {str(error)[:200]})") from error
