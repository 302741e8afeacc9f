"""The participants of a round: the clients invited, and those of them that answer.

A draw is a function of (seed, round) alone: in whatever order rounds are asked for, and whichever method asks, the
answer is the same. Dropping out has a stream of its own, so the dropout rate does not change who is invited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddpc.errors import BadInputError
from feddpc.rng import generator

Ids = npt.NDArray[np.int64]
Invite = Callable[[int], Ids]


@dataclass(frozen=True, eq=False)
class Draw:
    """The participants of one round, as sorted client ids: ``invited``, and of these the ``answered``."""

    invited: Ids
    answered: Ids

    @property
    def dropped(self) -> Ids:
        """Clients that were invited and never answered."""
        return np.setdiff1d(self.invited, self.answered, assume_unique=True)


@dataclass(frozen=True, eq=False)
class ClientPool:
    """What every scheme knows: how many clients exist, how many are wanted, the seed, and the clients' data sizes."""

    population: int
    cohort: int
    seed: int
    sizes: npt.ArrayLike | None = None

    def rng(self, round: int) -> np.random.Generator:
        """Return the generator that invites the clients of ``round``."""
        return generator(self.seed, "participation", round)


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the participants of any round; made by `make`."""

    pool: ClientPool
    dropout: float
    invite: Invite

    def draw(self, round: int) -> Draw:
        """Return the participants of ``round``, counted from 1; if clients drop out, possibly none answers."""
        if round < 1:
            raise BadInputError(f"round = {round}: rounds are counted from 1")
        invited = np.sort(self.invite(round))
        uniforms = generator(self.pool.seed, "dropout", round).random(len(invited))
        return Draw(invited, invited[uniforms >= self.dropout])


def uniform(pool: ClientPool) -> Invite:
    """Invite exactly m clients, all subsets equally likely."""
    return lambda round: subset(pool.rng(round), pool.population, pool.cohort)


def subset(rng: np.random.Generator, among: int, count: int) -> Ids:
    """Draw ``count`` of ``0 .. among - 1``; NumPy does this in time and memory O(count) when few of many are wanted."""
    return rng.choice(among, count, replace=False, shuffle=False)
