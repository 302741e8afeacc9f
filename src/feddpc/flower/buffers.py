"""Buffers of a state dict, such as BatchNorm's statistics: which arrays they are, and their mean over clients.

A buffer is measured, not trained, so it stays outside of everything that a method does with updates: projection,
norms, server rates. Means of variances are variances; differences of them, stretched by a method, need not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray
from torch import nn

from feddpc.errors import BadInputError
from feddpc.flower.wire import Layout, RefusedError, peek

Numbers = NDArray[np.generic]
POLICIES = ("average", "local", "refuse")
VARIANCE = "running_var"
#: How the names of float arrays end that are buffers in torch's own layers.
STATISTICS = ("running_mean", VARIANCE)
#: How the names of types begin that only buffers have.
COUNTS = ("int", "uint", "bool")


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
    found: dict[str, Numbers] = {}
    for name in layout.buffers:
        with np.errstate(over="ignore"):  # what the type cannot hold becomes infinite
            values = peek(arrays[name], name, layout.shapes[name], layout.dtypes[name]).astype(
                layout.dtypes[name], copy=False
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise RefusedError(f"{name} is not finite")
        if name.rpartition(".")[2] == VARIANCE and (values < 0).any():
            raise RefusedError(f"{name} is negative, which no variance is")
        found[name] = values
    return found


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
        """Take the buffers of one client in."""
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
