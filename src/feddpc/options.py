"""Menus: things chosen by name (a partition, a sampler, a model), each with options that have names and defaults.

An option is a keyword-only parameter of the function that builds the thing, so the signature is the only list of
options, and the configuration, the command line and the error messages all read it from there.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, Literal, TypeVar

from feddpc.errors import BadInputError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Menu(Generic[T]):
    """Builders by name; ``kind`` is what the error messages call an entry.

    >>> def rope(metres, *, colour="red"):
    ...     return f"{metres} m of {colour} rope"
    >>> menu = Menu("good", {"rope": rope})
    >>> menu.options("rope")
    {'colour': 'red'}
    >>> menu.builder("rope", {"colour": "blue"})(3, colour="blue")
    '3 m of blue rope'
    >>> menu.builder("rope", {"color": "blue"})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown option of good 'rope' 'color': did you mean 'colour'? Valid: colour
    """

    kind: str
    entries: Mapping[str, Callable[..., T]]

    def names(self) -> list[str]:
        """Return the valid names, in the order of the menu."""
        return list(self.entries)

    def options(self, name: str) -> dict[str, object]:
        """Return the options of ``name`` with their defaults."""
        parameters = inspect.signature(self._find(name)).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def builder(self, name: str, given: Mapping[str, object]) -> Callable[..., T]:
        """Return the builder of ``name`` after checking that every option in ``given`` is one of its options."""
        valid = self.options(name)
        for option in given:
            if option not in valid and not valid:
                raise BadInputError(f"{self.kind} {name!r} has no options, but {option!r} was given: leave it out")
            if option not in valid:
                raise unknown(f"option of {self.kind} {name!r}", option, valid)
        return self._find(name)

    def _find(self, name: str) -> Callable[..., T]:
        if name not in self.entries:
            raise unknown(self.kind, str(name), self.entries)
        return self.entries[name]


def whole(field: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number from ``low`` to ``high``, else raise.

    >>> whole("clients", 0, 1)
    Traceback (most recent call last):
    feddpc.errors.BadInputError: clients = 0: must be a whole number of at least 1
    """
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadInputError(f"{field} = {value!r}: must be a whole number {span}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def positive(field: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number above zero, else raise."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise BadInputError(f"{field} = {value!r}: must be a finite number above 0")
    return float(value)  # type: ignore[arg-type]


def chance_of(field: str, value: object, *, zero: bool = True, one: bool = True) -> float:
    """Return ``value`` as a float if it is a probability, with the ends allowed or not, else raise."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    p = float(value) if good else math.nan  # type: ignore[arg-type]
    if not 0 <= p <= 1 or (p == 0 and not zero) or (p == 1 and not one):
        left, right = "[" if zero else "(", "]" if one else ")"
        raise BadInputError(f"{field} = {value!r}: must be a probability in {left}0, 1{right}")
    return p


def fit(what: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the annotated type ``hint``, or say what was expected.

    >>> fit("lam", 2, float)
    2.0
    >>> fit("rounds", "many", int)
    Traceback (most recent call last):
    feddpc.errors.BadInputError: rounds = 'many' is a str, expected int
    """
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise unknown(what, str(value), typing.get_args(hint))
        return value
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not math.isfinite(number):
                raise BadInputError(f"{what} = {str(value)[:40]}: must be a finite number")
            return number
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(tuple(v) if isinstance(v, list | tuple) else v for v in value)
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    if value is None and type(None) in options:
        return None
    names = [_name(option) for option in options if option is not type(None)]
    raise BadInputError(f"{what} = {value!r} is a {type(value).__name__}, expected {' or '.join(names)}")


def _name(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    return getattr(option, "__name__", str(option))
