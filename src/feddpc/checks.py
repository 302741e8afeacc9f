"""Checks of single values: each returns the value in its type, or says which field is wrong and what is allowed."""

from __future__ import annotations

import math
import types
import typing
from numbers import Integral, Real
from typing import Any, Literal

from feddpc.errors import BadInputError, unknown


def check_int(field: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number from ``low`` to ``high``, else raise.

    >>> check_int("clients", 0, 1)
    Traceback (most recent call last):
    feddpc.errors.BadInputError: clients = 0: must be a whole number of at least 1
    """
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadInputError(f"{field} = {value!r}: must be a whole number {span}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_positive(field: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number above zero, else raise."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise BadInputError(f"{field} = {value!r}: must be a finite number above 0")
    return float(value)  # type: ignore[arg-type]


def check_probability(field: str, value: object, *, zero: bool = True, one: bool = True) -> float:
    """Return ``value`` as a float if it is a probability, with the ends allowed or not, else raise."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    p = float(value) if good else math.nan  # type: ignore[arg-type]
    if not 0 <= p <= 1 or (p == 0 and not zero) or (p == 1 and not one):
        left, right = "[" if zero else "(", "]" if one else ")"
        raise BadInputError(f"{field} = {value!r}: must be a probability in {left}0, 1{right}")
    return p


def coerce(what: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the annotated type ``hint``, or say what was expected.

    >>> coerce("lam", 2, float)
    2.0
    >>> coerce("rounds", "many", int)
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
