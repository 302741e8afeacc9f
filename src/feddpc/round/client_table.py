"""What is remembered of each client: a table whose rows are created when a client first takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import State
from feddpc.round.placement import ON_DEVICE, Placement
from feddpc.round.row_storage import SLOTS, SUMS, OnDisk

Ints = NDArray[np.int64]


class ClientTable:
    """A table with one row per client that has taken part, so its size does not depend on the population.

    ``fresh`` returns the state of a client without a row. ``read`` and ``write`` copy the rows of a cohort from and to
    where ``placement`` keeps them; what they return and take is on the device of ``fresh``. ``name`` is that of the
    file, if the rows are on disk.
    """

    def __init__(
        self,
        fresh: Callable[[], State],
        what: str,
        population: int,
        placement: Placement = ON_DEVICE,
        name: str = "clients",
    ) -> None:
        self._template = fresh()
        self._what = what
        self._population = population
        self._placement, self._name = placement, name
        self._row: dict[int, int] = {}
        self._client: list[int] = []  #: of each row
        self._store = placement.rows(self._template, population, name)

    def __bool__(self) -> bool:
        return bool(self._template)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def width(self) -> int:
        """How many numbers are remembered of one client."""
        return sum(v.numel() for v in self._template.values())

    def read(self, clients: Ints, into: State | None = None) -> State:
        """Return the states of ``clients``, stacked; a client without a row has the initial one.

        They are written ``into`` stacks that the caller has, or into new ones.
        """
        rows = [self._row.get(int(c), -1) for c in clients]
        seen = [i for i, row in enumerate(rows) if row >= 0]
        new = [i for i, row in enumerate(rows) if row < 0]
        state = {k: v.new_empty((len(rows), *v.shape)) for k, v in self._template.items()} if into is None else into
        if new:
            for key, initial in self._template.items():
                state[key][new] = initial
        if seen:
            self._store.read([rows[i] for i in seen], state, seen)
        return state

    def keeps(self, key: str) -> bool:
        """Return whether every client has something of this name."""
        return key in self._template

    def ids(self) -> Ints:
        """Return the clients that have a row."""
        return np.array(self._client, dtype=np.int64)

    def empty(self, count: int) -> State:
        """Return stacks for the states of so many clients in host memory, to be filled."""
        return {k: v.new_empty((count, *v.shape), device="cpu") for k, v in self._template.items()}

    def drop(self, clients: Ints) -> None:
        """Forget clients; the last rows take the places of theirs."""
        gone = {self._row.pop(int(c)) for c in clients}
        count = len(self._row)
        holes = sorted(row for row in gone if row < count)
        late = [client for row, client in enumerate(self._client[count:], count) if row not in gone]
        if holes:
            self._store.write(holes, self.read(np.array(late)))
            for hole, client in zip(holes, late, strict=True):
                self._row[client], self._client[hole] = hole, client
        del self._client[count:]
        self._store.truncate(count)

    def seen(self, clients: Ints) -> NDArray[np.bool_]:
        """Return which of ``clients`` have a row."""
        return np.array([int(c) in self._row for c in clients], dtype=bool)

    def write(self, clients: Ints, state: State, first_seen: Ints | None = None) -> None:
        """Store the states of ``clients``; keys, shapes and types must be those of the initial state.

        New clients get their rows in the order of ``first_seen``, by default that of ``clients``.
        """
        self._check(state, len(clients))
        if self._template and len(clients):
            for c in clients if first_seen is None else first_seen:
                self._row_of(int(c))
            self._store.write([self._row_of(int(c)) for c in clients], state)

    def export(self) -> tuple[Tensor, State]:
        """Return ids and table for a checkpoint; rows on disk stay there, and the table holds their places."""
        ids = torch.tensor(self._client, dtype=torch.int64)
        return ids, self._store.export(len(ids)) if self._template else {}

    def committed(self) -> None:
        """Release what only earlier checkpoints needed: the one with the latest export is complete."""
        self._store.committed()

    def restore(self, ids: Tensor, table: State) -> None:
        """Restore ids and table from a checkpoint, whichever kind of memory it was written with."""
        self._row, self._client = {}, []
        self._store = self._placement.rows(self._template, self._population, self._name)
        if SLOTS in table and self._placement.kind == "disk":
            self._client, self._store = ids.tolist(), self._adopted(table, self._placement)
            self._row = {client: row for row, client in enumerate(self._client)}
        else:
            self.add(ids, table, range(len(ids)), self._placement.part)

    def add(self, ids: Tensor, table: State, rows: Sequence[int], part: str) -> None:
        """Add some rows of a checkpoint; ``part`` names the process that wrote them, if they are on disk."""
        if SLOTS not in table:
            if len(rows):
                at = torch.tensor(list(rows), dtype=torch.int64)
                self.write(
                    ids[at].numpy(), {k: table[k] if len(at) == len(ids) else table[k][at] for k in self._template}
                )
            return
        file = self._adopted(table, replace(self._placement, part=part))
        row = {k: v.new_empty((1, *v.shape)) for k, v in self._template.items()}
        for i in rows:  # one by one: a second table may be more than there is room for
            file.read([i], row, [0])
            self.write(ids[i : i + 1].numpy(), row)

    def _adopted(self, table: State, placement: Placement) -> OnDisk:
        file = placement.file(self._template, self._name)
        file.adopt(table[SLOTS].tolist(), table[SUMS].tolist() if SUMS in table else ())
        return file

    def _row_of(self, client: int) -> int:
        """Return the row of a client; a new one has the next free row."""
        if client not in self._row:
            self._row[client] = len(self._client)
            self._client.append(client)
        return self._row[client]

    def _check(self, state: State, m: int) -> None:
        if state.keys() != self._template.keys():
            raise BadInputError(f"{self._what} must have the keys {sorted(self._template)}, but got {sorted(state)}")
        for key, stack in state.items():
            initial = self._template[key]
            if stack.shape != (m, *initial.shape) or stack.dtype != initial.dtype:
                raise BadInputError(
                    f"{self._what} {key!r} must be {tuple(initial.shape)} {initial.dtype} per client, "
                    f"but got {tuple(stack.shape[1:])} {stack.dtype}"
                )
