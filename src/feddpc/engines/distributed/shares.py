"""Which rank trains which clients of a round: every rank computes the same answer, so none has to be told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
#: What it costs to bring a client's memory to another rank, in local steps; see docs/scale.md for the measurement.
MOVE = 1.0


@dataclass(frozen=True)
class Shares:
    """The rank of every client of a round."""

    rank_of: Ints  #: by place in the cohort
    places: tuple[Ints, ...]  #: the places in the cohort of each rank's clients, in the order of the cohort

    @property
    def counts(self) -> list[int]:
        """How many clients each rank has."""
        return [len(mine) for mine in self.places]

    def without(self, gone: NDArray[np.bool_]) -> Shares:
        """Return the shares of the clients that are left, who stay where they are."""
        return shares_of(self.rank_of[~gone], len(self.places))


def shares_of(rank_of: Ints, size: int) -> Shares:
    """Return shares by rank from the rank of every client."""
    return Shares(rank_of, tuple(np.flatnonzero(rank_of == rank) for rank in range(size)))


def deal(work: Ints, size: int, home: Ints | None = None) -> Shares:
    """Deal clients with ``work`` local steps to ``size`` ranks: the longest first, each to whoever is done first.

    ``home`` is the rank that has a client's memory, -1 if there is none yet: another rank costs a move.

    >>> deal(np.array([5, 1, 1, 1, 2]), 2).rank_of.tolist()
    [0, 1, 1, 0, 1]
    >>> deal(np.array([2, 2]), 2, home=np.array([1, 0])).rank_of.tolist()
    [1, 0]
    """
    load, rank_of = [0.0] * size, np.zeros(len(work), dtype=np.int64)
    costs = (work + 1).tolist()  # beginning and ending a client take time too
    for i in np.argsort(-work, kind="stable").tolist():
        after = list(load)
        if home is not None and home[i] >= 0:
            after = [total + MOVE for total in load]
            after[home[i]] -= MOVE
        rank = after.index(min(after))
        load[rank] = after[rank] + costs[i]
        rank_of[i] = rank
    return shares_of(rank_of, size)
