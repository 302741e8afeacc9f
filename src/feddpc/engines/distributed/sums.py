"""The server's half of a method on the rows of one rank: what its rule adds up is added up over all ranks.

A rule that combines clients only in sums over the cohort (`Method.needs_only_sums`) runs on each part of the rows, and
what it wants to add up is recorded. The recorded sums of all parts and ranks are added up in one exchange. Then the
rule runs once more, on no rows, and every sum that it asks for is the recorded one. So a round sends one vector where a
rule needs one, however many clients there are, and rows are forgotten as soon as they are in the sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.engines.distributed.shares import Shares
from feddpc.methods.base import Cohort, State
from feddpc.population import placed
from feddpc.ranks import Ranks


class Sums(ABC):
    """What `Cohort.across` and `Cohort.gathered` do for a part of the cohort."""

    @abstractmethod
    def across(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks."""

    @abstractmethod
    def gathered(self, x_m: Tensor) -> Tensor:
        """Return the numbers of all clients."""


class AtOnce(Sums):
    """Adds up over the ranks at once: what a broadcast is made of must be known before training."""

    def __init__(self, ranks: Ranks, shares: Shares) -> None:
        self.ranks, self.shares = ranks, shares

    def across(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return self.ranks.add([partial.clone()])[0]

    def gathered(self, x_m: Tensor) -> Tensor:
        """Return the numbers of all clients."""
        return in_order(self.ranks, self.shares, x_m[:, None])[:, 0].to(x_m.device, x_m.dtype)


class Recording(Sums):
    """Records what a rule adds up while it runs on one part of the rows after the other."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.numbers: list[list[Tensor]] = []  #: per client, a list of parts
        self._sum = self._number = self._parts = 0

    def next_part(self) -> None:
        """Begin with the next part of the rows."""
        self._sum = self._number = 0
        self._parts += 1

    def across(self, partial: Tensor) -> Tensor:
        """Add to the sum that the rule asks for next; it is not known yet, so this part of it is returned."""
        if self._parts == 1:
            self.sums.append(partial.clone())
        else:
            self.sums[self._sum].add_(partial)
        self._sum += 1
        return partial

    def gathered(self, x_m: Tensor) -> Tensor:
        """Keep these clients' numbers."""
        if self._parts == 1:
            self.numbers.append([])
        self.numbers[self._number].append(x_m)
        self._number += 1
        return x_m

    def added(self, ranks: Ranks, shares: Shares) -> Replaying:
        """Add up what all ranks have recorded."""
        columns = [torch.cat(parts) for parts in self.numbers]
        table = torch.stack([x.double() for x in columns], 1) if columns else None
        whole = None if table is None else in_order(ranks, shares, table)
        numbers = [whole[:, i].to(x.device, x.dtype) for i, x in enumerate(columns)] if whole is not None else []
        return Replaying(ranks.add(self.sums), numbers)


class Replaying(Sums):
    """Gives the rule the sums of all ranks, in the order in which they were recorded."""

    def __init__(self, sums: list[Tensor], numbers: list[Tensor]) -> None:
        self._sums, self._numbers = iter(sums), iter(numbers)

    def across(self, partial: Tensor) -> Tensor:
        """Return the next sum; ``partial`` is that of no rows."""
        return next(self._sums)

    def gathered(self, x_m: Tensor) -> Tensor:
        """Return the next numbers of all clients."""
        return next(self._numbers)


@dataclass(frozen=True, kw_only=True)
class SharedCohort(Cohort):
    """Some clients of a cohort whose rows are spread over ranks; weights are those among all of them."""

    everyone: Cohort
    shares: Shares
    sums: Sums

    @property
    def whole(self) -> Cohort:
        """The cohort of all participants."""
        return self.everyone

    def part(self, rows: Tensor, sums: Sums) -> SharedCohort:
        """Return some clients of these, by their rows."""
        return replace(self, **_rows_of(self, rows), sums=sums)

    def without(self, gone: NDArray[np.bool_], ranks: Ranks) -> SharedCohort:
        """Return the cohort without some clients, who are marked in the order of the whole; new weights add up to 1."""
        device, mine = self.weights.device, self.shares.places[ranks.rank]
        keep, shares = placed(~gone[mine], device), self.shares.without(gone)
        slots = {key: x[keep] for key, x in self.slots.items()}
        rows = placed(shares.places[ranks.rank], device)
        return share_of(self.whole.select(placed(~gone, device)), shares, rows, slots, AtOnce(ranks, shares))

    def across(self, partial: Tensor) -> Tensor:
        """Add up over the ranks."""
        return self.sums.across(partial)

    def gathered(self, x_m: Tensor) -> Tensor:
        """Return the numbers of all clients."""
        return self.sums.gathered(x_m)


def share_of(whole: Cohort, shares: Shares, rows: Tensor, slots: State, sums: Sums) -> SharedCohort:
    """Return the clients of ``whole`` in places ``rows``; ``slots`` is what the server remembers of these."""
    own: dict[str, Any] = {f.name: getattr(whole, f.name) for f in fields(Cohort)}
    return SharedCohort(**own | _rows_of(whole, rows) | {"slots": slots}, everyone=whole, shares=shares, sums=sums)


def _rows_of(cohort: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return what a cohort has per client, of some clients."""
    own = {name: getattr(cohort, name) for name in ("clients", "weights", "steps", "samples")}
    slots = {key: x[rows] for key, x in cohort.slots.items()}
    return {name: x if x is None else x[rows] for name, x in own.items()} | {"slots": slots}


def in_order(ranks: Ranks, shares: Shares, mine: Tensor) -> Tensor:
    """Return a table of numbers per client of all ranks, in the order of the cohort, in host memory and float64."""
    tables = ranks.columns(mine, shares.counts)
    whole = tables[0].new_empty(len(shares.rank_of), mine.shape[1])
    for at, table in zip(shares.places, tables, strict=True):
        whole[torch.from_numpy(at)] = table
    return whole
