"""Which client holds which samples: the partition, the schemes that build one, and a summary of how uneven it is.

| name | what differs between clients |
|---|---|
| ``dirichlet`` | labels and sizes; Yurochkin et al. 2019, used in the paper |
| ``dirichlet-equal`` | labels only; a class prior per client, as in FedDyn |
| ``shards`` | labels only; a few pieces of the sorted data per client, McMahan et al. 2017 |
| ``quantity`` | sizes only |
| ``iid`` | nothing |

A function of the user's own, registered or named as ``FILE.py:FUNCTION``, takes what it names of ``labels``,
``clients`` and ``seed`` and returns a list with the sample indices of each client, a :class:`Partition`, or the pair
(all indices, number of samples of each client) that the schemes here return.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from feddpc.checks import check_int
from feddpc.data import schemes
from feddpc.data.schemes import Ids, resolve_min_size
from feddpc.errors import BadInputError
from feddpc.registry import Registry

__all__ = ["PARTITIONS", "Partition", "make", "names", "options", "resolve_min_size", "summary"]

PARTITIONS: Registry[Any] = Registry(
    "partition",
    {
        "dirichlet": schemes.dirichlet,
        "dirichlet-equal": schemes.dirichlet_equal,
        "shards": schemes.shards,
        "quantity": schemes.quantity,
        "iid": schemes.iid,
    },
    arguments=("labels", "clients", "seed"),
    accepts=inspect.isfunction,
)


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices of all clients in one array: client j holds ``order[starts[j]:starts[j + 1]]``.

    Two arrays instead of one list per client, so that a million clients need no more memory than their samples.

    >>> p = Partition.from_lists([[4, 0], [1, 2, 3]])
    >>> len(p), p[1].tolist(), p.sizes.tolist()
    (2, [1, 2, 3], [2, 3])
    """

    order: Ids
    starts: Ids

    def __post_init__(self) -> None:
        for field in ("order", "starts"):
            array = _integers(field, getattr(self, field)).view()
            array.flags.writeable = False  # the view only; all methods of a comparison share a partition
            object.__setattr__(self, field, array)
        s = self.starts
        if len(s) < 2 or s[0] != 0 or s[-1] != len(self.order) or (np.diff(s) < 0).any():
            raise BadInputError(
                f"starts of a partition must increase from 0 to len(order) = {len(self.order)}, for one client "
                "or more: build it with Partition.from_lists"
            )

    @classmethod
    def from_lists(cls, lists: Sequence[npt.ArrayLike]) -> Partition:
        """Build a partition from one sequence of sample indices per client; clients may share samples."""
        arrays = [_integers(f"samples of client {j}", mine) for j, mine in enumerate(lists)]
        if not arrays:
            raise BadInputError("a partition needs at least one client, but the list of clients is empty")
        return cls.from_sizes(np.concatenate(arrays), np.array([len(mine) for mine in arrays]))

    @classmethod
    def from_sizes(cls, order: Ids, sizes: Ids) -> Partition:
        """Build a partition from the indices of all clients in order, and the number of samples per client."""
        return cls(order, np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, client: int) -> Ids:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of a partition with {len(self)} clients")
        j = client % len(self)
        return self.order[self.starts[j] : self.starts[j + 1]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[j] for j in range(len(self)))

    @property
    def sizes(self) -> Ids:
        """Number of samples per client."""
        return np.diff(self.starts)

    def counts(self, labels: npt.ArrayLike, classes: int) -> Ids:
        """Return the number of samples per client and class, ``[clients, classes]``."""
        y = _integers("labels", labels)
        self._check_range(len(y))
        mine = y[self.order]
        if len(mine) and not 0 <= mine.min() <= mine.max() < classes:
            raise BadInputError(f"labels range from {mine.min()} to {mine.max()}, but classes = {classes}")
        owner = np.repeat(np.arange(len(self)), self.sizes)
        return np.bincount(owner * classes + mine, minlength=len(self) * classes).reshape(len(self), classes)

    def check(self, n_samples: int) -> None:
        """Raise unless every index is in ``0 .. n_samples - 1`` and no client is empty."""
        self._check_range(n_samples)
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            listed = ", ".join(str(j) for j in empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            raise BadInputError(f"no samples for client {listed}: leave empty clients out of the partition")

    def _check_range(self, n_samples: int) -> None:
        bad = np.flatnonzero((self.order < 0) | (self.order >= n_samples))
        if len(bad):
            j = int(np.searchsorted(self.starts, bad[0], side="right")) - 1
            raise BadInputError(
                f"client {j} holds sample {self.order[bad[0]]}, but the data have {n_samples} samples (0 to "
                f"{n_samples - 1}): build the partition from the same data"
            )


def names() -> list[str]:
    """Return the names of the schemes."""
    return PARTITIONS.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a scheme with their defaults.

    >>> options("dirichlet")
    {'alpha': 0.2, 'min_size': None}
    """
    return PARTITIONS.options(name)


def make(name: str, labels: npt.ArrayLike, clients: int, *, seed: int, **options: object) -> Partition:
    """Divide samples with these labels among ``clients`` clients. Each sample goes to one client, and none is empty.

    Args:
        name: one of `names()`.
        labels: the class of each sample, integers.
        clients: the number of clients.
        seed: equal seeds give equal partitions.
        options: options of the scheme, see `options`.

    >>> make("shards", [0, 1, 0, 1], clients=2, seed=0, shards=1).counts([0, 1, 0, 1], 2).tolist()
    [[2, 0], [0, 2]]
    """
    PARTITIONS.builder(name, options)
    y = _integers("labels", labels)
    if check_int("clients", clients, 1) > len(y):
        raise BadInputError(f"clients = {clients}, but there are only {len(y)} samples: use at most {len(y)} clients")
    dealt = PARTITIONS.build(name, {"labels": y, "clients": int(clients), "seed": seed}, options)
    if isinstance(dealt, tuple) and len(dealt) == 2:
        dealt = Partition.from_sizes(*dealt)
    elif isinstance(dealt, Sequence):
        dealt = Partition.from_lists(dealt)
    if not isinstance(dealt, Partition) or len(dealt) != clients:
        what = f"{len(dealt)} clients" if isinstance(dealt, Partition) else f"a {type(dealt).__name__}"
        raise BadInputError(
            f"partition {name!r} returned {what}: it must return a list with the sample indices of each of the "
            f"{clients} clients"
        )
    return dealt


def summary(partition: Partition, labels: npt.ArrayLike, classes: int) -> dict[str, float]:
    """Return numbers that describe how uneven a partition is.

    ``mean_label_distance`` is the mean over clients of the total-variation distance between the client's label
    distribution and that of all the data: 0 for equal, towards 1 for disjoint.
    """
    sizes, counts = partition.sizes, partition.counts(labels, classes)
    everyone = np.bincount(_integers("labels", labels), minlength=classes)
    gap = np.abs(counts / np.maximum(sizes, 1)[:, None] - everyone / everyone.sum()).sum(1) / 2
    return {
        "clients": len(partition),
        "samples": int(sizes.sum()),
        "min_size": int(sizes.min()),
        "median_size": float(np.median(sizes)),
        "max_size": int(sizes.max()),
        "std_size": float(sizes.std()),
        "mean_classes": float((counts > 0).sum(1).mean()),
        "mean_label_distance": float(gap.mean()),
    }


def _integers(field: str, values: npt.ArrayLike) -> Ids:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise BadInputError(
            f"{field}: must be a one-dimensional array of integers, not {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)
