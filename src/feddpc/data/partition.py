"""Which client holds which samples. :mod:`feddpc.data.schemes` builds partitions; a round only reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddpc.errors import BadInputError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """Sample indices of all clients in one array: client j holds ``order[starts[j]:starts[j + 1]]``.

    Two arrays instead of one list per client, so that a million clients need no more memory than their samples.

    >>> p = Partition.from_lists([[4, 0], [1, 2, 3]])
    >>> len(p), p[1].tolist(), p.sizes.tolist()
    (2, [1, 2, 3], [2, 3])
    >>> p
    Partition(2 clients, 5 samples, 2 to 3 per client)
    """

    order: Ids
    starts: Ids

    def __post_init__(self) -> None:
        for field in ("order", "starts"):
            array = integers(field, getattr(self, field)).view()
            array.flags.writeable = False  # the view only; all methods of a comparison share a partition
            object.__setattr__(self, field, array)
        s = self.starts
        if len(s) < 2 or s[0] != 0 or s[-1] != len(self.order) or (np.diff(s) < 0).any():
            raise BadInputError(
                f"starts of a partition must increase from 0 to len(order) = {len(self.order)}, for one client "
                "or more: build it with Partition.from_lists"
            )

    def __repr__(self) -> str:
        sizes = self.sizes
        return f"Partition({len(self)} clients, {len(self.order)} samples, {sizes.min()} to {sizes.max()} per client)"

    @classmethod
    def from_lists(cls, lists: Sequence[npt.ArrayLike]) -> Partition:
        """Build a partition from one sequence of sample indices per client; clients may share samples."""
        arrays = [integers(f"samples of client {j}", mine) for j, mine in enumerate(lists)]
        if not arrays:
            raise BadInputError("a partition needs at least one client, but the list of clients is empty")
        return cls.from_sizes(np.concatenate(arrays), np.array([len(mine) for mine in arrays]))

    @classmethod
    def from_sizes(cls, order: Ids, sizes: Ids) -> Partition:
        """Build a partition from the indices of all clients in order, and the number of samples per client."""
        return cls(order, np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def from_owners(cls, ids: npt.ArrayLike) -> Partition:
        """Build a partition from the owner of each sample; clients are in the order of their sorted ids."""
        _, owner, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        return cls.from_sizes(np.argsort(owner, kind="stable"), sizes)

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
        y = integers("labels", labels, "only class numbers can be counted by class")
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


def integers(field: str, values: npt.ArrayLike, remedy: str = "convert it") -> Ids:
    """Return ``values`` as a one-dimensional int64 array, or say that ``field`` is something else."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise BadInputError(
            f"{field}: must be a one-dimensional array of integers, not {array.dtype} of shape {array.shape}: {remedy}"
        )
    return array.astype(np.int64, copy=False)
