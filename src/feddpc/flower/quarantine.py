"""Quarantine: a node whose replies are refused round after round is not asked for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor

from feddpc.checks import check_int
from feddpc.errors import BadInputError, unknown
from feddpc.methods.base import State

#: After how many refused replies in a row a node is not asked, and for how many rounds, unless asked otherwise.
USUAL: Mapping[str, int] = MappingProxyType({"after": 3, "rounds": 10})
#: Under which names a checkpoint has the state.
NODES, FAILURES, UNTIL = "quarantine/nodes", "quarantine/failures", "quarantine/until"


def usual_quarantine(table: Mapping[str, Any] | bool | None, *, private: bool) -> Mapping[str, Any] | bool | None:
    """Return the quarantine of a strategy: under differential privacy none, and one that was asked for is refused."""
    if not private or not table:
        return table
    if table is not USUAL:
        raise BadInputError(
            f"quarantine = {table!r} cannot be run with privacy: which nodes are asked would depend on their replies, "
            "and the budget is counted for independent coins: leave it out"
        )
    return None


@dataclass
class Quarantine:
    """Which nodes were refused how often in a row, and which are not asked until when.

    >>> quarantine = Quarantine(after=2, rounds=5)
    >>> for t in (1, 2):
    ...     quarantine.saw(t, good=[7], bad={9: "a is not finite"})
    >>> quarantine.excluded(3), quarantine.excluded(8), quarantine.choose([7, 9], 3, least=2)
    ({9}, set(), [7, 9])
    """

    after: int
    rounds: int
    failures: dict[int, int] = field(default_factory=dict)  #: refused replies in a row, by node
    until: dict[int, int] = field(default_factory=dict)  #: the last round in which a node is not asked

    @classmethod
    def make(cls, table: Mapping[str, Any] | bool | None) -> Quarantine | None:
        """Return the quarantine that an argument asks for; None and False switch it off.

        >>> Quarantine.make({"after": 5}), Quarantine.make(False)
        (Quarantine(after=5, rounds=10, failures={}, until={}), None)
        """
        if table is None or table is False:
            return None
        if table is True:
            table = USUAL
        if not isinstance(table, Mapping):
            raise BadInputError(
                f"quarantine = {table!r}: must be a table such as {dict(USUAL)}, or None for no quarantine at all"
            )
        for name in table:
            if name not in USUAL:
                raise unknown("option of the quarantine", str(name), tuple(USUAL))
        values = {name: check_int(f"quarantine.{name}", v, 1) for name, v in {**USUAL, **table}.items()}
        return cls(values["after"], values["rounds"])

    def excluded(self, t: int) -> set[int]:
        """Return the nodes that are not asked in round ``t``."""
        return {node for node, last in self.until.items() if t <= last}

    def choose(self, nodes: Iterable[int], t: int, least: int) -> list[int]:
        """Return the nodes that may be asked in round ``t``, in their order.

        If fewer than ``least`` are left, so that a round could not count, those come back whose quarantine ends first.
        """
        nodes, out = list(nodes), self.excluded(t)
        left = len(nodes) - len(out & set(nodes))
        back = sorted(out & set(nodes), key=lambda node: (self.until[node], node))[: max(least - left, 0)]
        if back:
            log(INFO, "round %d: nodes %s are asked in spite of their quarantine: %d are needed", t, back, least)
        return [node for node in nodes if node not in out or node in back]

    def saw(self, t: int, good: Iterable[int], bad: Mapping[int, str]) -> None:
        """Learn whose replies of round ``t`` were good, and why those of others were not."""
        self.until = {node: last for node, last in self.until.items() if last >= t}  # round t is yet to be evaluated
        for node in good:
            self.failures.pop(node, None)
            self.until.pop(node, None)
        for node, reason in bad.items():
            self.failures[node] = self.failures.get(node, 0) + 1
            if self.failures[node] >= self.after:
                self.until[node] = t + self.rounds
                log(
                    WARNING,
                    "node %d is not asked in the next %d rounds, because its last %d replies were refused: %s",
                    *(node, self.rounds, self.failures.pop(node), reason),
                )

    def export(self) -> State:
        """Return the state as tensors for a checkpoint; node ids are unsigned, and torch stores signed numbers."""
        nodes = sorted({*self.failures, *self.until})
        if not nodes:
            return {}
        tables = (self.failures, self.until)
        counts = (torch.tensor([table.get(node, 0) for node in nodes]) for table in tables)
        signed = torch.tensor([node - (1 << 64) if node >= 1 << 63 else node for node in nodes])
        return dict(zip((NODES, FAILURES, UNTIL), (signed, *counts), strict=True))

    def stored(self, watched: State) -> State:
        """Return what a run remembers of earlier rounds, with the state in it."""
        return {name: value for name, value in watched.items() if name not in (NODES, FAILURES, UNTIL)} | self.export()

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Take the state from a checkpoint."""
        columns = (stored.get(name, torch.zeros(0, dtype=torch.int64)).tolist() for name in (NODES, FAILURES, UNTIL))
        rows = [(node % (1 << 64), failures, until) for node, failures, until in zip(*columns, strict=True)]
        self.failures = {node: failures for node, failures, _ in rows if failures}
        self.until = {node: until for node, _, until in rows if until}
