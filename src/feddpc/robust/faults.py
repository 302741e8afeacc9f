"""Fault injection: some clients of the population misbehave, always the same ones for a seed.

| kind | what the client does in a round in which it misbehaves |
|---|---|
| ``straggler`` | answers too late: it counts as dropped |
| ``nan``, ``inf`` | one number of what it sends is not finite |
| ``huge`` | every number it sends is 1e30, with its own sign |
| ``zero`` | sends zeros |
| ``sign_flip`` | sends the opposite |
| ``scaled`` | sends ``scale`` times its update; a negative ``scale`` also turns it round |
| ``noise`` | adds noise, on average ``spread`` times as long as its update |
| ``replayed`` | sends what it sent the first time it took part, for ever |
| ``colluding`` | all of them send one vector, against the mean of their honest updates and of their mean length |
| ``parallel`` | sends almost a multiple of the last global update; what matters is hidden in a part ``tilt`` as long |

Each kind is given a share of the population. Who belongs to it is a function of the seed; whether it misbehaves in a
round (with chance ``often``) and its noise are functions of (seed, round, client). Local training is honest: a fault
changes what is sent after it, in every vector that is sent. An answer to a probe (FedGA's ``fresh``) is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddpc.checks import check_positive, check_probability, coerce
from feddpc.errors import BadInputError, unknown
from feddpc.methods.base import State
from feddpc.rng import generator
from feddpc.robust import attacks

Ids = npt.NDArray[np.int64]
Roll = npt.NDArray[np.bool_]

KINDS = (
    "straggler",
    "nan",
    "inf",
    "huge",
    "zero",
    "sign_flip",
    "scaled",
    "noise",
    "replayed",
    "colluding",
    "parallel",
)
#: How strongly they misbehave.
DEFAULTS = {"often": 1.0, "scale": 10.0, "spread": 1.0, "tilt": 1e-3}


STRENGTH_OF = {"scale": "scaled", "spread": "noise", "tilt": "parallel"}


class Tampered(NamedTuple):
    """What arrived, what the attackers remember now, and who did what."""

    up: State
    memory: State
    who: dict[str, list[int]]


def complete(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the checked table of faults with every strength filled in; an empty one stays empty.

    >>> complete({"sign_flip": 0.2})
    {'sign_flip': 0.2, 'often': 1.0, 'scale': 10.0, 'spread': 1.0, 'tilt': 0.001}
    >>> complete({"sign-flip": 0.2})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown fault 'sign-flip': did you mean 'sign_flip'? Valid: colluding, huge, inf, ...
    """
    for name in table:
        if name not in (*KINDS, *DEFAULTS):
            raise unknown("fault", str(name), KINDS, f"; options of faults: {', '.join(DEFAULTS)}")
    shares = {kind: check_probability(f"faults.{kind}", table[kind]) for kind in KINDS if kind in table}
    if math.fsum(shares.values()) > 1 + 1e-9:
        raise BadInputError(f"faults: the shares add up to {math.fsum(shares.values()):.3g}: they must stay within 1")
    how = {name: table.get(name, usual) for name, usual in DEFAULTS.items()}
    how["often"] = check_probability("faults.often", how["often"], zero=False)
    how["tilt"] = check_probability("faults.tilt", how["tilt"], zero=False)
    how["spread"] = check_positive("faults.spread", how["spread"])
    how["scale"] = coerce("faults.scale", how["scale"], float)
    if table and not shares:
        raise BadInputError("faults: no client misbehaves: give a kind its share, such as sign_flip = 0.2")
    for name, kind in STRENGTH_OF.items():
        if how[name] != DEFAULTS[name] and kind not in shares:
            raise BadInputError(f"faults.{name} is for faults.{kind}, which has no share: leave it out")
    return shares | how if shares else {}


@dataclass(frozen=True, eq=False)
class Faults:
    """Who misbehaves, how, and how often; made by `make`."""

    seed: int
    members: Mapping[str, Ids]
    how: Mapping[str, float]

    def late(self, round: int, ids: Ids) -> Roll:
        """Say which of clients ``ids`` answer too late in a round."""
        return self._active("straggler", round, ids)

    def tamper(self, round: int, ids: Ids, up: State, memory: State) -> Tampered:
        """Return what clients ``ids`` send in a round instead of ``up``; nothing handed in is changed."""
        sent, who = dict(up), {}
        for kind in KINDS[1:]:
            rows = np.flatnonzero(self._active(kind, round, ids))
            if kind == "replayed" and len(rows):
                rows, memory = self._replays(ids, rows, sent, memory)
            elif kind == "parallel":
                rows = rows if "last" in memory else rows[:0]
            if len(rows):
                who[kind] = ids[rows].tolist()
                self._replace(kind, round, ids[rows], rows, sent, memory)
        return Tampered(sent, memory, who)

    def saw(self, update: Tensor, memory: State) -> State:
        """Return what attackers know after a round: the global update, which two models in a row give away."""
        return {**memory, "last": update.clone()} if len(self.members["parallel"]) else memory

    def _active(self, kind: str, round: int, ids: Ids) -> Roll:
        active: Roll = np.isin(ids, self.members[kind])
        if self.how["often"] < 1:
            for i in np.flatnonzero(active):
                active[i] = generator(self.seed, "misbehaves", round, int(ids[i])).random() < self.how["often"]
        return active

    def _replace(self, kind: str, round: int, ids: Ids, rows: Ids, sent: State, memory: State) -> None:
        """Put what ``kind`` sends into ``rows`` of every stack; ``ids`` are the clients there."""
        for key, stack in sent.items():
            index = torch.from_numpy(rows).to(stack.device)
            honest = stack[index].reshape(len(rows), -1)
            if kind == "replayed":
                slots = torch.from_numpy(np.searchsorted(self.members[kind], ids)).to(stack.device)
                new = memory[f"replayed.{key}"][slots].reshape(len(rows), -1)
            elif kind == "parallel" and honest.shape[1] != memory["last"].numel():
                continue  # only an update can be parallel to one
            else:
                new = self._attack(kind, round, key, ids, memory)(honest)
            sent[key] = stack.clone()
            sent[key][index] = new.reshape(len(rows), *stack.shape[1:]).to(stack.dtype)

    def _attack(self, kind: str, round: int, key: str, ids: Ids, memory: State) -> attacks.Attack:
        if kind == "noise":
            generators = [generator(self.seed, f"noise in {key}", round, int(j)) for j in ids]
            return attacks.noisy(self.how["spread"], generators)
        if kind == "parallel":
            return attacks.parallel(memory["last"], self.how["tilt"])
        return {
            "nan": attacks.with_one(math.nan),
            "inf": attacks.with_one(math.inf),
            "huge": attacks.huge,
            "zero": attacks.times(0.0),
            "sign_flip": attacks.times(-1.0),
            "scaled": attacks.times(self.how["scale"]),
            "colluding": attacks.colluding,
        }[kind]

    def _replays(self, ids: Ids, rows: Ids, sent: State, memory: State) -> tuple[Ids, State]:
        """Let clients that take part for the first time remember what they send; return the other rows."""
        members = self.members["replayed"]
        slots = np.searchsorted(members, ids[rows])
        memory = dict(memory)
        seen = memory.get("replayed/seen", torch.zeros(len(members), dtype=torch.bool)).clone()
        first = ~seen.cpu().numpy()[slots]
        for key, stack in sent.items():
            name = f"replayed.{key}"
            table = memory[name].clone() if name in memory else stack.new_zeros(len(members), *stack.shape[1:])
            table[slots[first]] = stack[rows[first]]
            memory[name] = table
        seen[slots] = True
        return rows[~first], memory | {"replayed/seen": seen}


def make(table: Mapping[str, Any], *, population: int, seed: int) -> Faults | None:
    """Return the faults that ``table`` asks for (shares by kind, and strengths), None if it asks for none.

    >>> faults = make({"zero": 0.25, "nan": 0.5}, population=8, seed=0)
    >>> {kind: len(ids) for kind, ids in faults.members.items() if len(ids)}
    {'nan': 4, 'zero': 2}
    """
    known = complete(table)
    if not known:
        return None
    order, first, members = generator(seed, "faults").permutation(population), 0, {}
    for kind in KINDS:
        count = min(math.floor(known.get(kind, 0.0) * population + 0.5), population - first)
        if known.get(kind) and not count:
            raise BadInputError(
                f"faults.{kind} = {known[kind]:g} of {population} clients is none: ask for {1 / population:g} or more"
            )
        members[kind] = np.sort(order[first : first + count])
        first += count
    return Faults(seed, members, {name: known[name] for name in DEFAULTS})
