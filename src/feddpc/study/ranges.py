"""What one quantity may be: a range of numbers or a list of choices, written as the command line writes it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddpc.config import parse_set, write_toml
from feddpc.errors import BadInputError

#: Kinds of ranges and what their numbers are.
KINDS = {"uniform": float, "log": float, "int": int, "logint": int}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included: ``uniform`` or ``log``, and ``int`` or ``logint`` if whole."""

    kind: str
    low: float
    high: float

    def __post_init__(self) -> None:
        said = f"range {self}"
        if self.kind not in KINDS:
            raise BadInputError(f"{said}: the kind is one of {', '.join(KINDS)}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadInputError(f"{said}: the second number must be above the first, and both finite")
        if self.is_log and self.low <= 0:
            raise BadInputError(f"{said}: a logarithmic range begins above 0")
        if self.is_whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise BadInputError(f"{said}: the ends must be whole numbers")

    def __str__(self) -> str:
        return f"{self.kind}:{self.low:.17g}:{self.high:.17g}"

    @property
    def is_log(self) -> bool:
        """Whether factors count, not differences."""
        return self.kind.startswith("log")

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return KINDS[self.kind] is int

    def draw(self, rng: np.random.Generator) -> float | int:
        """Draw one number."""
        # A whole number has the room half below and half above it, so that the ends are as likely as the others.
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        u = rng.random()
        value = low * (high / low) ** u if self.is_log else low + (high - low) * u
        if self.is_whole:
            return int(min(max(round(value), self.low), self.high))
        return float(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return spelled(self.values)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw one value."""
        return self.values[int(rng.integers(len(self.values)))]


def parse(text: str) -> Range | Choice:
    """Read a range or a list of choices.

    >>> parse("log:1e-4:1").kind, parse("int:1:8").high, parse("0.1,0.3").values, parse("fresh,stale").values
    ('log', 8.0, (0.1, 0.3), ('fresh', 'stale'))
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon or kind not in KINDS:
        return Choice(tuple(values(text)))
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
        found: list[Any] = tomllib.loads(f"v = [{text}]")["v"]
    except (ValueError, RecursionError):
        found = [parse_set(f"v={word}")[1] for word in text.split(",")]
    if not found or "" in found:
        raise BadInputError(f"{text!r}: write values with commas between them")
    return found


def spelled(listed: Sequence[Any]) -> str:
    """Return what `values` reads back.

    >>> spelled([0.1, True, "soft", [8]])
    '0.1, true, "soft", [8]'
    """
    return ", ".join(write_toml({"v": value}).strip().removeprefix("v = ") for value in listed)
