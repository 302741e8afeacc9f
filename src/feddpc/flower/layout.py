"""How the arrays of a Flower model map to one vector of parameters and a set of buffers.

Buffers, such as BatchNorm's statistics, are measured and not trained. A method's arithmetic on updates (projection,
norms, server rates) leaves them out: a mean of variances is a variance, but a scaled difference of variances need not
be one. The server averages buffers over the clients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.errors import BadInputError
from feddpc.flower.messages import RefusedError, expect, layout_tag, peek
from feddpc.methods.base import State

Numbers = NDArray[np.generic]
FLOATS = ("float32", "float64")
POLICIES = ("average", "local", "refuse")
VARIANCE = "running_var"
#: How the names of float arrays end that are buffers in torch's own layers.
STATISTICS = ("running_mean", VARIANCE)
#: Prefixes of dtypes that only buffers have.
COUNTS = ("int", "uint", "bool")


class Layout:
    """Maps the arrays of a Flower model to one vector, in the order of the record.

    Arrays that are named as ``buffers`` are not part of the vector; with ``optional`` a record may lack them.

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
        """A short name for this layout; equal layouts have equal names."""
        return layout_tag(self.shapes)

    def vector(self, arrays: Mapping[str, Array]) -> Tensor:
        """Return the parameters of ``arrays`` as one vector, after checking names, shapes and types."""
        return self._gather(arrays, lambda _, values, out: np.copyto(out, values))

    def update(self, w: Tensor, arrays: Mapping[str, Array], into: Tensor | None = None) -> Tensor:
        """Return ``w`` less the vector of ``arrays``, in one pass; ``into`` is where it goes, if it is given."""
        before = w.numpy()
        return self._gather(arrays, lambda span, values, out: np.subtract(before[span], values, out=out), into)

    def record(self, w: Tensor, buffers: Mapping[str, Array] | None = None) -> ArrayRecord:
        """Return a vector and buffers as a record of this layout."""
        arrays = {**(buffers or {})}
        for name, (a, b) in self.spans.items():
            part = w[a:b].reshape(self.shapes[name]).numpy()
            arrays[name] = Array(part.astype(self.dtypes[name], copy=False))
        return ArrayRecord({name: arrays[name] for name in self.names if name in arrays})

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


def buffer_names(module: nn.Module) -> list[str]:
    """Return the names of the buffers in a module's state dict.

    >>> buffer_names(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    state = module.state_dict()
    return [name for name, _ in module.named_buffers(remove_duplicate=False) if name in state]


def find_buffers(arrays: Mapping[str, Array], patterns: Iterable[str] = ()) -> list[str]:
    """Return which arrays are buffers: whole numbers, running statistics, and names that match one of ``patterns``."""
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in arrays):
            raise BadInputError(
                f"buffer_names = {pattern!r} matches no array of the model, whose arrays are {', '.join(arrays)}: "
                "correct it, or leave it out"
            )
    return [
        name
        for name, array in arrays.items()
        if array.dtype.startswith(COUNTS)
        or name.rpartition(".")[2] in STATISTICS
        or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def read_buffers(layout: Layout, arrays: Mapping[str, Array]) -> dict[str, Numbers]:
    """Return the buffers of a reply in the types of the model, or refuse it."""
    buffers: dict[str, Numbers] = {}
    for name in layout.buffers:
        with np.errstate(over="ignore"):  # what the type cannot hold becomes infinite
            values = peek(arrays[name], name, layout.shapes[name], layout.dtypes[name]).astype(
                layout.dtypes[name], copy=False
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise RefusedError(f"{name} is not finite")
        if name.rpartition(".")[2] == VARIANCE and (values < 0).any():
            raise RefusedError(f"{name} is negative, which no variance is")
        buffers[name] = values
    return buffers


class BufferMean:
    """The weighted mean of buffers that come one after the other; of whole numbers the largest.

    >>> mean = BufferMean()
    >>> mean.add({"v": np.array([1.0]), "n": np.array(3)}, 1.0)
    >>> mean.add({"v": np.array([4.0]), "n": np.array(2)}, 2.0)
    >>> mean.values
    {'v': array([3.]), 'n': array(3)}
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.values: dict[str, Numbers] = {}

    def add(self, buffers: Mapping[str, Numbers], weight: float) -> None:
        """Add the buffers of one client."""
        self.total += weight
        share = weight / self.total
        for name, new in buffers.items():
            old = self.values.get(name, new)
            if new.dtype.kind == "f":
                # Two terms that are never negative for variances, and never longer than the longer of the two.
                self.values[name] = np.asarray(old.astype(np.float64) * (1 - share) + new.astype(np.float64) * share)
            else:
                self.values[name] = np.asarray(np.maximum(old, new))

    def arrays(self, layout: Layout) -> dict[str, Array]:
        """Return the mean in the types of the model."""
        return {name: Array(values.astype(layout.dtypes[name])) for name, values in self.values.items()}


#: How the names of buffers begin among the tensors of a checkpoint.
STORED = "buffers/"


def store_buffers(watched: State, buffers: Mapping[str, Array], mean: BufferMean) -> State:
    """Return what a checkpoint has besides the model, with the buffers that were averaged."""
    return {**watched, **{STORED + name: torch.from_numpy(np.array(buffers[name].numpy())) for name in mean.values}}


def restore_buffers(layout: Layout, watched: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the buffers that a checkpoint has."""
    stored = {name: watched.get(STORED + name) for name in layout.buffers}
    return {name: Array(values.numpy()) for name, values in stored.items() if values is not None}
