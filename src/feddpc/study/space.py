"""What to try: a grid, random draws, or a search that learns from earlier trials."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from feddpc.checks import check_int
from feddpc.config import parse_set, write_toml
from feddpc.errors import BadInputError
from feddpc.rng import generator

Settings = dict[str, Any]
#: How many trials per method an adaptive search asks for before it sees their scores.
BATCH = 5
#: The key of which more values are tried where a method has fewer settings than another.
RATE = "lr"
#: Kinds of ranges, and the type of their numbers.
KINDS = {"uniform": float, "log": float, "int": int, "logint": int}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included: ``uniform`` or ``log``, and ``int`` or ``logint`` if whole."""

    kind: str
    low: float
    high: float

    def __post_init__(self) -> None:
        start = f"range {self}"
        if self.kind not in KINDS:
            raise BadInputError(f"{start}: the kind is one of {', '.join(KINDS)}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadInputError(f"{start}: the second number must be above the first, and both finite")
        if self.is_log and self.low <= 0:
            raise BadInputError(f"{start}: a logarithmic range begins above 0")
        if self.is_whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise BadInputError(f"{start}: the ends must be whole numbers")

    def __str__(self) -> str:
        return f"{self.kind}:{self.low:.17g}:{self.high:.17g}"

    @property
    def is_log(self) -> bool:
        """Whether the range is logarithmic."""
        return self.kind.startswith("log")

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are drawn."""
        return KINDS[self.kind] is int

    def draw(self, rng: np.random.Generator) -> float | int:
        """Draw one number."""
        # From half below to half above, so that the ends are as likely as the other whole numbers.
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        u = rng.random()
        value = low * (high / low) ** u if self.is_log else low + (high - low) * u
        if self.is_whole:
            return int(min(max(round(value), self.low), self.high))
        return float(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Categorical:
    """A list of values to choose from."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return spelled(self.values)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw one value."""
        return self.values[int(rng.integers(len(self.values)))]


def parse(text: str) -> Range | Categorical:
    """Read a range or a list of choices.

    >>> parse("log:1e-4:1").kind, parse("int:1:8").high, parse("0.1,0.3").values, parse("fresh,stale").values
    ('log', 8.0, (0.1, 0.3), ('fresh', 'stale'))
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon or kind not in KINDS:
        return Categorical(tuple(values(text)))
    try:
        low, high = (float(number) for number in rest.split(":"))
    except ValueError:
        raise BadInputError(f"range {text!r}: write KIND:LOW:HIGH, e.g. log:1e-4:1") from None
    return Range(kind, low, high)


def values(text: str) -> list[Any]:
    """Read values with commas between them: numbers, true and false, lists, words.

    >>> values("0.3, 1"), values("[8],[16,8]"), values("zero,soft")
    ([0.3, 1], [[8], [16, 8]], ['zero', 'soft'])
    """
    try:
        parsed: list[Any] = tomllib.loads(f"v = [{text}]")["v"]
    except (ValueError, RecursionError):
        parsed = [parse_set(f"v={word}")[1] for word in text.split(",")]
    if not parsed or "" in parsed:
        raise BadInputError(f"{text!r}: write values with commas between them")
    return parsed


def spelled(listed: Sequence[Any]) -> str:
    """Return what `values` reads back.

    >>> spelled([0.1, True, "soft", [8]])
    '0.1, true, "soft", [8]'
    """
    return ", ".join(write_toml({"v": value}).strip().removeprefix("v = ") for value in listed)


class Search(Protocol):
    """The trials of one method, handed out in batches."""

    def ask(self) -> list[Settings]:
        """Return the next settings to try; none when the budget is spent."""

    def tell(self, scores: Sequence[float | None]) -> None:
        """Take the scores of the last batch, higher is better; None for a trial that could not be run."""


@dataclass(frozen=True)
class Space:
    """Which settings are tried. Keys are those of ``--set``: ``lr``, ``lam``, ``feddpc.lam``, ``model.groups``.

    ``hyper.lam`` is ``lam`` too. Keys that a method does not have are left out for it.

    >>> Space.grid({"lr": [0.1, 0.01], "hyper.lam": [0.5, 1.0]}).search(["lr"]).ask()
    [{'lr': 0.1}, {'lr': 0.01}]
    >>> len(Space.random({"lr": "log:1e-4:1"}, 20, seed=3).search(["lr"]).ask())
    20
    """

    axes: Mapping[str, Range | Categorical]
    trials: int | None = None  #: per method; None tries every combination
    seed: int = 0
    sampler: str | None = None  #: one of Optuna's; None for independent draws or a grid
    batch: int = BATCH

    def __post_init__(self) -> None:
        if not self.axes:
            raise BadInputError("a sweep needs something to vary: give at least one key")
        for key, axis in self.axes.items():
            if isinstance(axis, Categorical) and not axis.values:
                raise BadInputError(f"{key} has nothing to choose from: give at least one value")
            if isinstance(axis, Categorical) and any(axis.values.count(v) > 1 for v in axis.values):
                raise BadInputError(f"{key} = {axis}: one of the values is there twice")
        if self.trials is not None:
            check_int("trials", self.trials, 1)
        check_int("batch", self.batch, 1)
        if self.sampler is not None:
            if self.trials is None:
                raise BadInputError(f"sampler {self.sampler!r} needs trials: say how many per method")
            from feddpc.study.adaptive import check_sampler

            check_sampler(self.sampler)

    @classmethod
    def grid(cls, axes: Mapping[str, Sequence[Any]]) -> Space:
        """Every combination of the listed values."""
        return cls({key: Categorical(tuple(listed)) for key, listed in axes.items()})

    @classmethod
    def random(cls, axes: Mapping[str, str | Range | Sequence[Any]], n: int, seed: int = 0) -> Space:
        """Make ``n`` independent draws; methods that share a key get the same draws of it."""
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

    def extended(self, more: Space) -> Space:
        """Return this space with the values and trials that ``more`` adds."""
        if set(self.axes) != set(more.axes) or (self.trials is None) != (more.trials is None):
            raise BadInputError(
                f"--extend adds values of {', '.join(self.axes)} to this sweep: for other keys choose another --out"
            )
        if self.trials is not None:
            return dataclasses.replace(more, axes=self.axes, trials=max(self.trials, more.trials or 0))
        axes = {key: [*axis.values] for key, axis in self.axes.items() if isinstance(axis, Categorical)}
        for key, axis in more.axes.items():
            axes[key] += [v for v in axis.values if v not in axes[key]] if isinstance(axis, Categorical) else []
        return Space.grid(axes)

    def size(self, keys: Sequence[str]) -> int:
        """Return how many settings a method that has ``keys`` gets to try."""
        axes = [axis for key, axis in self.axes.items() if key in keys]
        if self.trials is not None and axes:
            return self.trials
        return math.prod(len(axis.values) for axis in axes if isinstance(axis, Categorical))

    def search(self, keys: Sequence[str]) -> Search:
        """Return the trials of a method that has ``keys``, a part of the axes."""
        axes = {key: axis for key, axis in self.axes.items() if key in keys}
        if self.sampler is not None and axes:
            from feddpc.study.adaptive import OptunaSearch

            return OptunaSearch(axes, self.trials or 1, self.seed, self.sampler, self.batch)
        return _Listed(self._drawn(axes) if self.trials is not None and axes else _product(axes))

    def _drawn(self, axes: Mapping[str, Range | Categorical]) -> list[Settings]:
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
        """The scores change nothing."""


def _product(axes: Mapping[str, Range | Categorical]) -> list[Settings]:
    for key, axis in axes.items():
        if isinstance(axis, Range):
            raise BadInputError(f"{key} = {axis} is a range, and a grid has no end of it: list values, or give trials")
    listed = [axis.values for axis in axes.values() if isinstance(axis, Categorical)]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*listed)]


def _axis(axis: str | Range | Sequence[Any]) -> Range | Categorical:
    if isinstance(axis, str):
        return parse(axis)
    return axis if isinstance(axis, Range) else Categorical(tuple(axis))


def finer(values: Sequence[float], count: int) -> list[float]:
    """Return ``count`` numbers: the given ones, then the geometric means between neighbours, the largest first.

    >>> finer([1.0, 0.1, 0.01], 5), finer([1.0, 0.1], 1)
    ([1.0, 0.1, 0.01, 0.316, 0.0316], [1.0, 0.1])
    """
    row = list(values)
    while len(row) < count and len(row) > 1:
        ordered = sorted(row, reverse=True)
        middles = [rounded(math.sqrt(a * b), 3) for a, b in itertools.pairwise(ordered)]
        fresh = [m for m in middles if m not in row][: count - len(row)]
        if not fresh:
            break
        row += fresh
    return row


def rounded(value: float, digits: int = 6) -> float:
    """Return a number with so many digits.

    >>> rounded(0.1 * 3)
    0.3
    """
    return float(f"{value:.{digits}g}")


def equal_budgets(settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Give every group as many settings as the largest has, by finer rates, where the rate is all that it varies.

    >>> {
    ...     k: len(v)
    ...     for k, v in equal_budgets(
    ...         {"a": [{"lr": 1.0}, {"lr": 0.1}], "b": [{"lr": 1.0, "mu": m} for m in (0.1, 0.2, 0.3)]}
    ...     ).items()
    ... }
    {'a': 3, 'b': 3}
    """
    most = max((len(mine) for mine in settings.values()), default=0)
    equal = {}
    for group, mine in settings.items():
        rates = [float(rate) for values in mine if isinstance(rate := values.get(RATE), int | float)]
        fill = len(rates) == len(mine) and min(rates, default=0.0) > 0 and all(set(values) == {RATE} for values in mine)
        equal[group] = [{RATE: rate} for rate in finer(rates, most)] if fill else [dict(values) for values in mine]
    return equal
