"""What travels: tensors as Flower's array records, and what every message says about itself.

Reading distrusts its input. An array is looked at before it is used: how it was written, its type, its shape, and how
many bytes it has. Nothing is unpickled, and nothing is allocated that the receiver did not expect.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.npy import Header, read_header
from feddpc.errors import BadInputError, FeddpcError
from feddpc.methods.base import State

R = TypeVar("R", ArrayRecord, MetricRecord)
#: The longest header of an array that is read.
HEADER = 1 << 12
FLOATS = ("float32", "float64")
#: Names of records: what a message says about the experiment, what a reply says about itself, and why it says no more.
ORDERS, REPLY, REFUSED = "orders", "reply", "refused"
#: The record that says which handout a client must have, and how a client says that it has not.
SETUP, NO_SETUP = "setup", "this node does not have what the server hands out"


class RefusedError(FeddpcError):
    """A message that cannot be used, and why."""


def pack(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as a record."""
    return ArrayRecord({key: Array(value.detach().cpu().numpy()) for key, value in state.items()})


def unpack(record: ArrayRecord, device: torch.device | str = "cpu") -> State:
    """Return a record's tensors, in memory of torch's own (at other addresses, sums may run in another order)."""
    found = {key: peek(array, key) for key, array in record.items()}
    try:
        return {key: torch.from_numpy(np.array(values)).to(device, copy=True) for key, values in found.items()}
    except TypeError as error:
        raise RefusedError(f"an array is not made of numbers: {error}") from None


def peek(array: Array, name: str, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> NDArray[Any]:
    """Return a view of an array's numbers, without a copy; ``shape`` and ``dtype`` are what is expected, if anything.

    Where a floating type is expected, any floating type passes: the receiver casts, and checks what comes of it.

    >>> peek(Array(np.array([1.0, 2.0])), "w", (2,), "float64")
    array([1., 2.])
    >>> peek(Array(np.array([1.0, 2.0])), "w", (3,), "float64")
    Traceback (most recent call last):
    feddpc.flower.wire.RefusedError: w has shape (2,), not (3,)
    """
    if array.stype != "numpy.ndarray":
        raise RefusedError(f"{name} was written as {array.stype!r}, not 'numpy.ndarray'")
    # In a file of NumPy's, byte 6 is the version, and the header's length follows.
    start = 10 if array.data[6:7] == b"\x01" else 12
    start += int.from_bytes(array.data[8:start], "little")
    try:
        header = _header(array.data[: min(start, HEADER)])
    except Exception as error:  # of any kind
        raise RefusedError(f"{name} is no array: {error}") from None
    if dtype is not None and str(header.dtype) != dtype and not header.dtype.kind == np.dtype(dtype).kind == "f":
        raise RefusedError(f"{name} is {header.dtype}, not {dtype}")
    if shape is not None and header.shape != shape:
        raise RefusedError(f"{name} has shape {header.shape}, not {shape}")
    if not header.fills(len(array.data) - start):
        raise RefusedError(f"{name} has {len(array.data) - start} bytes, which is not {header.shape} of {header.dtype}")
    values = np.frombuffer(array.data, header.dtype, header.numbers, start)
    return values.reshape(header.shape, order="F" if header.by_columns else "C")


@functools.lru_cache(maxsize=4096)
def _header(start: bytes) -> Header:
    """Read the header of an array. A model's arrays have the same ones every time."""
    return read_header(io.BytesIO(start))


def tensor(array: Array, name: str, like: Tensor) -> Tensor:
    """Return an array as a tensor of its own, of the type of ``like``, after checking shape and kind of numbers."""
    values = peek(array, name, tuple(like.shape), str(like.numpy().dtype))
    made = torch.empty(like.shape, dtype=like.dtype)
    with np.errstate(over="ignore"):  # what the type cannot hold becomes infinite, and is refused as that
        np.copyto(made.numpy(), values)
    return made


def cast_note(arrays: Mapping[str, Array], dtypes: Mapping[str, str]) -> str | None:
    """Return a sentence about the first array in another floating type than expected, None if there is none."""
    for name, dtype in dtypes.items():
        if name in arrays and arrays[name].dtype != dtype:
            return f"{name} came as {arrays[name].dtype} and is cast to {dtype}"
    return None


def expect(record: Mapping[str, Array], names: Iterable[str], what: str, optional: Iterable[str] = ()) -> None:
    """Refuse a record that has not exactly these ``names``; those that are ``optional`` may be there."""
    names, known = list(names), {*names, *optional}
    missing, extra = [n for n in names if n not in record], [n for n in record if n not in known]
    if missing:
        raise RefusedError(f"{what} lacks {', '.join(missing[:3])}{' and more' if missing[3:] else ''}")
    if extra:
        raise RefusedError(
            f"{what} has {', '.join(extra[:3])}{' and more' if extra[3:] else ''}, which nobody asked for"
        )


class Layout:
    """How the arrays of a Flower model lie in one vector, in the order of the record.

    Arrays that are named as ``buffers`` are no part of the vector; with ``optional`` a record may lack them.

    >>> layout = Layout(ArrayRecord({"a": Array(np.ones((2, 2), np.float32)), "b": Array(np.zeros(1, np.float32))}))
    >>> layout.d, layout.vector(layout.record(torch.arange(5.0)))
    (5, tensor([0., 1., 2., 3., 4.]))
    """

    def __init__(self, arrays: Mapping[str, Array], buffers: Iterable[str] = (), *, optional: bool = False) -> None:
        self.names = list(arrays)
        self.buffers = list(buffers)
        self.optional = set(self.buffers) if optional else set()
        self.required = [name for name in self.names if name not in self.optional]
        self.shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        self.dtypes = {name: array.dtype for name, array in arrays.items()}
        parameters = [name for name in self.names if name not in set(self.buffers)]
        for name in parameters:
            if self.dtypes[name] not in FLOATS:
                raise BadInputError(
                    f"array {name!r} of the model is {self.dtypes[name]}, but updates are made of "
                    f"{' or '.join(FLOATS)}: convert it"
                )
        self.dtype = torch.float64 if any(self.dtypes[name] == "float64" for name in parameters) else torch.float32
        ends = np.cumsum([int(np.prod(self.shapes[name])) for name in parameters])
        self.spans = {n: (int(e) - int(np.prod(self.shapes[n])), int(e)) for n, e in zip(parameters, ends, strict=True)}
        self.d = int(ends[-1]) if len(ends) else 0

    @property
    def tag(self) -> str:
        """A name for this layout; equal layouts have equal names."""
        return layout_tag(self.shapes)

    def vector(self, arrays: Mapping[str, Array]) -> Tensor:
        """Return the parameters of ``arrays`` as one vector, after checking that they are what they should be."""
        return self._gather(arrays, lambda _, values, out: np.copyto(out, values))

    def update(self, w: Tensor, arrays: Mapping[str, Array], into: Tensor | None = None) -> Tensor:
        """Return ``w`` less the vector of ``arrays``, in one pass; ``into`` is where it goes, if it is given."""
        before = w.numpy()
        return self._gather(arrays, lambda span, values, out: np.subtract(before[span], values, out=out), into)

    def record(self, w: Tensor, buffers: Mapping[str, Array] | None = None) -> ArrayRecord:
        """Return a vector and buffers as a record of this layout."""
        made = {**(buffers or {})}
        for name, (a, b) in self.spans.items():
            part = w[a:b].reshape(self.shapes[name]).numpy()
            made[name] = Array(part.astype(self.dtypes[name], copy=False))
        return ArrayRecord({name: made[name] for name in self.names if name in made})

    def _gather(
        self,
        arrays: Mapping[str, Array],
        put: Callable[[slice, NDArray[Any], NDArray[Any]], object],
        into: Tensor | None = None,
    ) -> Tensor:
        expect(arrays, self.required, "the model", self.optional)
        vector = torch.empty(self.d, dtype=self.dtype) if into is None else into
        numbers = vector.numpy()
        with np.errstate(over="ignore"):  # what the type cannot hold becomes infinite, and is refused as that
            for name, (a, b) in self.spans.items():
                values = peek(arrays[name], name, self.shapes[name], self.dtypes[name])
                put(slice(a, b), values.reshape(-1), numbers[a:b])
        return vector


def layout_tag(shapes: Mapping[str, Iterable[int]]) -> str:
    """Return a short name for a model's parameters: their names, order and shapes."""
    text = ";".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    """Return an array record of a message; an absent one is empty."""
    found = content.get(key)
    return found if isinstance(found, ArrayRecord) else ArrayRecord()


def only_record(content: RecordDict, kind: type[R]) -> R:
    """Return the one record of a kind in a message, as Flower's strategies want it, or refuse the message.

    Flower's own ``content.array_records`` ties the content into a cycle, so that a model would stay in memory until
    the garbage collector comes.
    """
    found = [record for record in content.values() if isinstance(record, kind)]
    if len(found) != 1:
        what = kind.__name__.removesuffix("Record").lower()
        raise RefusedError(f"it has {len(found)} {what} records, not one")
    return found[0]
