"""Read the official CIFAR pickles without running anything in them.

A pickle is a program. These ones need to build dicts, lists, bytes and one numpy array; so the reader knows four
names, each bound to a stand-in that can do nothing else, and refuses every other.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from feddpc.errors import DataError


def loads(content: bytes, where: str) -> Any:
    """Unpickle ``content``, or raise DataError naming the global it asked for; ``where`` names the file in messages."""
    try:
        _check_memo(content)
        return _Reader(io.BytesIO(content), where).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any opcode, with almost any exception
        raise DataError(f"{where} is not a readable pickle ({type(error).__name__}: {error}): get it again") from error


def _check_memo(content: bytes) -> None:
    """Refuse a memo index beyond any honest one: the reader allocates up to it, tens of gigabytes for ten bytes."""
    for opcode, index, _ in pickletools.genops(content):
        if opcode.name in {"PUT", "BINPUT", "LONG_BINPUT"} and not 0 <= int(index or 0) <= len(content):
            raise pickle.UnpicklingError(f"memo index {index}")


def _blank_array(kind: object, _shape: object, _dtype: object) -> np.ndarray[Any, Any]:
    # The real shape arrives with the state that follows; honouring this one would let a pickle allocate at will.
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"an array of kind {kind!r}")
    return np.ndarray((0,), np.int8)


def _plain_dtype(code: str | bytes, *_flags: int) -> np.dtype[Any]:
    text = code.decode("ascii") if isinstance(code, bytes) else code
    if text.lstrip("<>|=") not in {"u1", "i1", "i4", "i8"}:
        raise pickle.UnpicklingError(f"an array of type {text!r}")
    return np.dtype(text, align=False, copy=True)  # a copy, because the state that follows is written into it


def _encode(text: str, codec: str | bytes = "latin1") -> bytes:
    if codec not in {"latin1", b"latin1"}:
        raise pickle.UnpicklingError(f"bytes in the codec {codec!r}")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _blank_array,
    ("numpy._core.multiarray", "_reconstruct"): _blank_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="bytes")  # the official files were written by Python 2
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise DataError(
                f"{self._where} is a pickle that asks for {module}.{name}, which no official data file needs: refused, "
                "nothing of it was run"
            ) from None
