"""Where the memories of clients are: each with the rank that trained the client last, until another rank needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from feddpc.data.batches import Ints
from feddpc.engines.distributed.shares import Shares
from feddpc.ranks import Ranks

if TYPE_CHECKING:
    from feddpc.round.client_table import ClientTable
    from feddpc.round.state import RunState


class Homes:
    """The rank that has what is remembered of a client, known to all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._rank_of: dict[int, int] | None = None  #: None before the first round, and where nothing is remembered

    def find(self, state: RunState) -> None:
        """Before the first round, learn where a checkpoint or a survey has put memories, if there are any."""
        if self._rank_of is None and (state.slots or state.clients):
            known = self.ranks.gather((state.slots.ids(), state.clients.ids()))
            self._rank_of = {int(i): rank for rank, tables in enumerate(known) for ids in tables for i in ids}

    def of(self, ids: Ints) -> Ints | None:
        """Return the rank with the memory of each client, -1 where there is none; None if nothing is remembered."""
        if self._rank_of is None:
            return None
        return np.array([self._rank_of.get(int(i), -1) for i in ids], dtype=np.int64)

    def move(self, state: RunState, ids: Ints, shares: Shares) -> None:
        """Bring the memories of clients ``ids`` to the ranks that train them now."""
        home = self.of(ids)
        if home is None or self._rank_of is None:
            return
        away = np.flatnonzero((home >= 0) & (home != shares.rank_of))
        if len(away):
            for table in (state.slots, state.clients):
                if table:
                    self._move_rows(table, ids[away], home[away], shares.rank_of[away])
        self._rank_of.update(zip(ids[away].tolist(), shares.rank_of[away].tolist(), strict=True))

    def note(self, ids: Ints, shares: Shares, kept: Ints) -> None:
        """Note that the ranks which trained clients ``kept``, some of ``ids``, remember them now."""
        if self._rank_of is not None:
            counts = np.isin(ids, kept)
            self._rank_of.update(zip(ids[counts].tolist(), shares.rank_of[counts].tolist(), strict=True))

    def _move_rows(self, table: ClientTable, ids: Ints, source: Ints, target: Ints) -> None:
        """Send rows that leave and receive those that come, one message per key and pair of ranks."""
        me, others = self.ranks.rank, range(self.ranks.size)
        leaving = {rank: ids[(source == me) & (target == rank)] for rank in others}
        coming = {rank: ids[(target == me) & (source == rank)] for rank in others}
        sent = [
            (r, x.cpu().contiguous()) for r, mine in leaving.items() if len(mine) for x in table.read(mine).values()
        ]
        stacks = {rank: table.empty(len(mine)) for rank, mine in coming.items() if len(mine)}
        self.ranks.move(sent, [(rank, x) for rank, state in stacks.items() for x in state.values()])
        for mine in leaving.values():
            table.drop(mine)
        for rank, state in stacks.items():
            table.write(coming[rank], state)
