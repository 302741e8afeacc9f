"""Memory about clients: rows that appear when a client is first seen and are owned by the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import State

Ints = NDArray[np.int64]


class Memory:
    """A table with one row a client, created at first sight, so that its size follows who came and not the population.

    ``fresh`` makes the state of a client that was never seen; ``read`` and ``write`` move the rows of a cohort.
    """

    def __init__(self, fresh: Callable[[], State], what: str, population: int) -> None:
        self._template = fresh()
        self._what = what
        self._population = population
        self._row: dict[int, int] = {}
        self._table: State = {k: v.new_zeros(0, *v.shape) for k, v in self._template.items()}

    def __bool__(self) -> bool:
        return bool(self._template)

    def __len__(self) -> int:
        return len(self._row)

    def read(self, clients: Ints) -> State:
        """Return the states of ``clients``, stacked; a client never seen has the initial one."""
        rows = [self._row.get(int(c), -1) for c in clients]
        state = {}
        for key, initial in self._template.items():
            stack = initial.expand(len(rows), *initial.shape).clone()
            known = [i for i, row in enumerate(rows) if row >= 0]
            if known:
                stack[known] = self._table[key][[rows[i] for i in known]]
            state[key] = stack
        return state

    def write(self, clients: Ints, state: State) -> None:
        """Store the states of ``clients``; keys, shapes and types must be those of the initial state."""
        self._check(state, len(clients))
        if not self._template:
            return
        rows = [self._row.setdefault(int(c), len(self._row)) for c in clients]
        for key, stack in state.items():
            table = self._table[key]
            if len(self._row) > len(table):
                table = self._table[key] = _grown(table, len(self._row), self._population)
            table[rows] = stack

    def export(self) -> tuple[Tensor, State]:
        """Return ids and table for a checkpoint."""
        n = len(self._row)
        return torch.tensor(list(self._row), dtype=torch.int64), {k: v[:n] for k, v in self._table.items()}

    def restore(self, ids: Tensor, table: State) -> None:
        """Take ids and table back from a checkpoint."""
        self._row = {int(c): i for i, c in enumerate(ids)}
        self._table = {k: table[k].to(v.device, v.dtype, copy=True) for k, v in self._template.items()}

    def _check(self, state: State, m: int) -> None:
        if state.keys() != self._template.keys():
            raise BadInputError(f"{self._what} must have the keys {sorted(self._template)}, but got {sorted(state)}")
        for key, stack in state.items():
            initial = self._template[key]
            if stack.shape != (m, *initial.shape) or stack.dtype != initial.dtype:
                raise BadInputError(
                    f"{self._what} {key!r} must be {tuple(initial.shape)} {initial.dtype} a client, "
                    f"but got {tuple(stack.shape[1:])} {stack.dtype}"
                )


def _grown(table: Tensor, rows: int, population: int) -> Tensor:
    """Return the table with room for at least ``rows`` rows; doubling keeps growth cheap."""
    larger = table.new_zeros(min(max(rows, 2 * len(table)), max(rows, population)), *table.shape[1:])
    larger[: len(table)] = table
    return larger
