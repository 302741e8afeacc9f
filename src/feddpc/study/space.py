"""What to try: a grid, random draws, or a search that learns from what it has seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from feddpc.checks import check_int
from feddpc.errors import BadInputError
from feddpc.rng import generator
from feddpc.study import ranges
from feddpc.study.ranges import Choice, Range

Settings = dict[str, Any]
#: How many trials of a method an adaptive search asks for before it hears how they did.
BATCH = 5


class Search(Protocol):
    """The trials of one method, handed out in batches."""

    def ask(self) -> list[Settings]:
        """Return the next settings to try; none when the budget is spent."""

    def tell(self, scores: Sequence[float | None]) -> None:
        """Hear how the settings of the last batch did, higher is better; None for one that could not be run."""


@dataclass(frozen=True)
class Space:
    """Which settings are tried. Keys are those of ``--set``: ``lr``, ``lam``, ``feddpc.lam``, ``model.groups``.

    ``hyper.lam`` is ``lam`` too. A method leaves out the keys that it has not.

    >>> Space.grid({"lr": [0.1, 0.01], "hyper.lam": [0.5, 1.0]}).search(["lr"]).ask()
    [{'lr': 0.1}, {'lr': 0.01}]
    >>> len(Space.random({"lr": "log:1e-4:1"}, 20, seed=3).search(["lr"]).ask())
    20
    """

    axes: Mapping[str, Range | Choice]
    trials: int | None = None  #: of every method; None tries everything
    seed: int = 0
    sampler: str | None = None  #: one of Optuna's; None draws at random, or everything
    batch: int = BATCH

    def __post_init__(self) -> None:
        if not self.axes:
            raise BadInputError("a sweep needs something to vary: give at least one key")
        for key, axis in self.axes.items():
            if isinstance(axis, Choice) and not axis.values:
                raise BadInputError(f"{key} has nothing to choose from: give at least one value")
            if isinstance(axis, Choice) and any(axis.values.count(v) > 1 for v in axis.values):
                raise BadInputError(f"{key} = {axis}: one of the values is there twice")
        if self.trials is not None:
            check_int("trials", self.trials, 1)
        check_int("batch", self.batch, 1)
        if self.sampler is not None:
            if self.trials is None:
                raise BadInputError(f"sampler {self.sampler!r} needs trials: say how many of each method")
            from feddpc.study.adaptive import check_sampler

            check_sampler(self.sampler)

    @classmethod
    def grid(cls, axes: Mapping[str, Sequence[Any]]) -> Space:
        """Every combination of the listed values."""
        return cls({key: Choice(tuple(listed)) for key, listed in axes.items()})

    @classmethod
    def random(cls, axes: Mapping[str, str | Range | Sequence[Any]], n: int, seed: int = 0) -> Space:
        """Make ``n`` independent draws; a key that several methods have is drawn alike for all of them."""
        return cls({key: _axis(axis) for key, axis in axes.items()}, n, seed)

    @classmethod
    def optuna(
        cls,
        axes: Mapping[str, str | Range | Sequence[Any]],
        n: int,
        sampler: str = "tpe",
        seed: int = 0,
        batch: int = BATCH,
    ) -> Space:
        """Make ``n`` trials that one of Optuna's samplers proposes, ``batch`` of them at a time."""
        return cls({key: _axis(axis) for key, axis in axes.items()}, n, seed, sampler, batch)

    def size(self, keys: Sequence[str]) -> int:
        """Return how many settings a method that has ``keys`` gets to try."""
        axes = [axis for key, axis in self.axes.items() if key in keys]
        if self.trials is not None and axes:
            return self.trials
        return math.prod(len(axis.values) for axis in axes if isinstance(axis, Choice))

    def search(self, keys: Sequence[str]) -> Search:
        """Return the trials of a method that has ``keys``, a part of the axes."""
        axes = {key: axis for key, axis in self.axes.items() if key in keys}
        if self.sampler is not None and axes:
            from feddpc.study.adaptive import OptunaSearch

            return OptunaSearch(axes, self.trials or 1, self.seed, self.sampler, self.batch)
        return _Listed(self._drawn(axes) if self.trials is not None and axes else _product(axes))

    def _drawn(self, axes: Mapping[str, Range | Choice]) -> list[Settings]:
        return [
            {key: axis.draw(generator(self.seed, f"sweep {key}", trial)) for key, axis in axes.items()}
            for trial in range(self.trials or 0)
        ]


@dataclass
class _Listed:
    """Settings that are known from the beginning."""

    settings: list[Settings]
    asked: bool = field(default=False, init=False)

    def ask(self) -> list[Settings]:
        if self.asked:
            return []
        self.asked = True
        return self.settings

    def tell(self, scores: Sequence[float | None]) -> None:
        """Nothing depends on how they did."""


def _product(axes: Mapping[str, Range | Choice]) -> list[Settings]:
    for key, axis in axes.items():
        if isinstance(axis, Range):
            raise BadInputError(f"{key} = {axis} is a range, and a grid has no end of it: list values, or give trials")
    listed = [axis.values for axis in axes.values() if isinstance(axis, Choice)]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*listed)]


def _axis(axis: str | Range | Sequence[Any]) -> Range | Choice:
    if isinstance(axis, str):
        return ranges.parse(axis)
    return axis if isinstance(axis, Range) else Choice(tuple(axis))
