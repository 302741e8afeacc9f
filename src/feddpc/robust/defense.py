"""What a server does with updates that it does not trust: an adaptive bound on their norms, then a robust rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from feddpc.checks import check_int, check_positive
from feddpc.errors import BadInputError, unknown
from feddpc.methods._algebra import row_squares
from feddpc.methods.base import State
from feddpc.robust.rules import Rule, RuleOutcome

#: Norms of how many replies the bound is taken from.
WINDOW = 100
#: How the names of norms begin in what the server remembers: of clients that trained, and of those that did not.
NORMS, NORMS_AT_REST = "norms", "norms at rest"
#: The bound of real federations unless asked otherwise: far above what honest clients send, see docs/attacks.md.
FEDERATION: Mapping[str, float] = MappingProxyType({"norm": 30.0})


@dataclass(frozen=True)
class Defense:
    """How the server protects itself.

    The bound: a client is turned away if the norm of anything it sends is more than ``norm`` times the median norm of
    the last ``window`` replies, this round's included. Turned away or not, a reply counts for that median, so that the
    bound follows honest norms wherever they go; fewer than half of the replies being hostile, they cannot move it at
    will. ``norm`` 0 is no bound; a median of zero bounds nothing.
    """

    rule: Rule | None = None
    norm: float = 0.0
    window: int = WINDOW

    def screen(self, up: State, trained: Tensor, memory: State) -> tuple[Tensor, State]:
        """Return which clients are within the bound, ``[m]``, and what the server remembers of norms now.

        Those who ``trained`` and those who did not (FedAMD's anchors) are compared with their like only.
        """
        good = torch.ones_like(trained)
        if not self.norm:
            return good, memory
        memory = dict(memory)
        for key, stack in up.items():
            norms = _norms(stack)
            for name, group in ((f"{NORMS}.{key}", trained), (f"{NORMS_AT_REST}.{key}", ~trained)):
                own = norms[group]
                pool = torch.cat([memory.get(name, own[:0]), own])[-max(self.window, len(own)) :]
                if not len(pool):
                    continue
                usual, memory[name] = pool.median(), pool
                good &= ~group | (norms <= self.norm * usual) | (usual == 0)
        return good, memory

    def explain(self, trained: Tensor, memory: State) -> dict[int, str]:
        """Say for every client beyond the bound, by its place in the last cohort that was screened, by how much."""
        reasons: dict[int, str] = {}
        for name, pool in memory.items():
            kind, _, key = name.partition(".")
            if kind not in (NORMS, NORMS_AT_REST):
                continue
            members = (trained if kind == NORMS else ~trained).nonzero()[:, 0].tolist()
            usual = float(pool.median())
            for client, norm in zip(members, pool[len(pool) - len(members) :].tolist(), strict=True):
                if norm > self.norm * usual > 0:
                    reasons[client] = (
                        f"{key} has norm {norm:.4g}, the bound is {self.norm * usual:.4g}, {self.norm:g} times the "
                        f"median norm {usual:.4g} of the last {len(pool)} replies"
                    )
        return reasons

    def apply_rule(self, up: State, trained: Tensor) -> RuleOutcome:
        """Apply the rule to the clients that trained, and apart from them to those that did not (FedAMD's anchors)."""
        assert self.rule is not None
        kept, out = torch.zeros_like(trained), {k: x.clone() for k, x in up.items()}
        for group in (trained, ~trained):
            if not bool(group.any()):
                continue
            outcome = self.rule({k: x[group] for k, x in up.items()})
            members = group.nonzero()[:, 0][outcome.kept]
            kept[members] = True
            for key, rows in outcome.up.items():
                out[key][members] = rows
        return RuleOutcome(kept, {k: x[kept] for k, x in out.items()})


def _norms(rows: Any) -> Tensor:
    """Return the norm of every row; of rows that are read one at a time, those that are known already."""
    if isinstance(rows, Tensor):
        return row_squares(rows.reshape(len(rows), -1)).sqrt()
    known: Tensor | None = rows.norms
    if known is not None:
        return known
    return torch.stack([row_squares(row.reshape(1, -1))[0].sqrt() for row in rows])


def complete(table: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the checked options of the bound, all of them; an empty table stays empty: no bound.

    >>> complete({"norm": 5})
    {'norm': 5.0, 'window': 100}
    """
    for name in table:
        if name not in ("norm", "window"):
            raise unknown("option of the screen", str(name), ("norm", "window"))
    if not table:
        return {}
    if "norm" not in table:
        raise BadInputError("screen.window without screen.norm: say how many median norms are the bound")
    norm = check_positive("screen.norm", table["norm"])
    if norm < 1:
        raise BadInputError(f"screen.norm = {norm}: must be at least 1, or most updates are turned away")
    return {"norm": norm, "window": check_int("screen.window", table.get("window", WINDOW), 1)}


def make(rule: Rule | None, table: Mapping[str, Any]) -> Defense | None:
    """Return the defense of a rule and the options of a bound, None if there is neither."""
    bound = complete(table)
    if rule is None and not bound:
        return None
    return Defense(rule, float(bound.get("norm", 0.0)), int(bound.get("window", WINDOW)))
