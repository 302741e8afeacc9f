"""Read the official CIFAR pickles without running anything in them.

A pickle is a program. These ones need to build dicts, lists, bytes and one numpy array; so the reader knows four
names, each bound to a stand-in that can do nothing else, and refuses every other. numpy's own classes are not among
them: a pickle sets the state of what it builds, and a type of numbers whose state says that it holds objects makes
numpy follow the numbers as if they were addresses.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from feddpc.errors import DataError

#: A tuple may be remembered and used twice in the next one; looking up the last takes 2 to the power of their number.
MOST_TUPLES = 16


def loads(content: bytes, where: str) -> Any:
    """Unpickle ``content``, or raise DataError naming the global it asked for; ``where`` names the file in messages."""
    try:
        _check(content)
        found = _Reader(io.BytesIO(content), where).load()
        return {key: _plain(value) for key, value in found.items()} if isinstance(found, dict) else _plain(found)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any opcode, with almost any exception
        raise DataError(f"{where} is not a readable pickle ({type(error).__name__}: {error}): get it again") from error


def _check(content: bytes) -> None:
    """Refuse what would take memory or time without end: ten bytes can ask for tens of gigabytes."""
    tuples = 0
    for opcode, value, _ in pickletools.genops(content):
        if opcode.name in {"PUT", "BINPUT", "LONG_BINPUT"} and not 0 <= int(value or 0) <= len(content):
            raise pickle.UnpicklingError(f"memo index {value}")
        tuples += opcode.name in {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
        if tuples > MOST_TUPLES:
            raise pickle.UnpicklingError("more tuples than any official file has")


class _Type:
    """Stands for a numpy type of whole numbers; its state is taken from its name alone."""

    def __init__(self, code: str | bytes, *_flags: int) -> None:
        text = code.decode("ascii") if isinstance(code, bytes) else code
        if text.lstrip("<>|=") not in {"u1", "i1", "i4", "i8"}:
            raise pickle.UnpicklingError(f"an array of type {text!r}")
        self.text = text.lstrip("<>|=")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if order not in {"<", ">", "|", "="}:
            raise pickle.UnpicklingError(f"numbers in the byte order {order!r}")
        self.text = order + self.text.lstrip("<>|=")


class _Array:
    """Stands for a numpy array: empty until its state arrives, which says shape, type and bytes."""

    def __init__(self, kind: object, _shape: object, _type: object) -> None:
        # Honouring that shape would let a pickle allocate at will.
        if kind is not _KIND:
            raise pickle.UnpicklingError(f"an array of kind {kind!r}")
        self.value = np.empty((0,), np.int8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, kind, by_columns, raw = state
        dtype = np.dtype(kind.text)
        if not isinstance(raw, bytes) or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array that is not made of bytes")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise pickle.UnpicklingError(f"an array of shape {shape} in {len(raw)} bytes")
        self.value = np.frombuffer(raw, dtype).reshape(shape, order="F" if by_columns else "C")


class _Encode:
    """Stands for the function that makes bytes of text; not one itself, because a pickle may change those."""

    __slots__ = ()

    def __call__(self, text: str, codec: str | bytes = "latin1") -> bytes:
        if codec not in {"latin1", b"latin1"}:
            raise pickle.UnpicklingError(f"bytes in the codec {codec!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a change of what is not its own")


#: Stands for the name ``numpy.ndarray``, which is only ever mentioned.
_KIND = object()
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _KIND,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Encode(),
}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


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
