"""Schedules of the learning rates: a factor of the round, in (0, 1], on both of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from feddpc.checks import check_int, check_probability
from feddpc.errors import BadInputError, unknown
from feddpc.own_functions import describe
from feddpc.registry import Registry

#: The factor on both learning rates in a round.
Schedule = Callable[[int], float]


def constant() -> Schedule:
    """Return the factor 1 for all rounds."""
    return lambda _: 1.0


def cosine(rounds: int, *, final: float = 0.01, over: int | None = None) -> Schedule:
    """Return half a cosine wave from 1 in round 1 to ``final`` in round ``over``, and from there on."""
    check_probability("lr_schedule.final", final, zero=False)
    last = _round_number("lr_schedule.over", over, rounds)

    def factor(t: int) -> float:
        passed = min((t - 1) / max(last - 1, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * passed)) / 2

    return factor


def step(*, every: int = 30, factor: float = 0.1) -> Schedule:
    """Multiply by ``factor`` after ``every`` so many rounds."""
    check_int("lr_schedule.every", every, 1)
    check_probability("lr_schedule.factor", factor, zero=False)
    return lambda t: float(factor ** ((t - 1) // every))


def warmup(
    rounds: int, *, warm: int = 5, then: str = "constant", final: float = 0.01, over: int | None = None
) -> Schedule:
    """Rise in equal steps to 1 in round ``warm``; then stay, or fall to ``final`` in round ``over`` as a cosine."""
    check_int("lr_schedule.warm", warm, 1)
    last = _round_number("lr_schedule.over", over, rounds)
    if then not in ("constant", "cosine"):
        raise unknown("lr_schedule.then", str(then), ("constant", "cosine"))
    if then == "constant":
        return lambda t: min(t / warm, 1.0)
    after = cosine(max(last - warm + 1, 1), final=final)
    return lambda t: t / warm if t < warm else after(t - warm + 1)


SCHEDULES: Registry[Schedule] = Registry(
    "lr_schedule",
    {"constant": constant, "cosine": cosine, "step": step, "warmup": warmup},
    arguments=("rounds",),
)
#: Functions of the user's own, by the name under which a configuration has them.
_given: dict[str, Schedule] = {}


def make_schedule(name: str, options: Mapping[str, Any], rounds: int) -> Schedule:
    """Return the schedule ``name`` for a run of so many rounds.

    >>> factor = make_schedule("cosine", {"final": 0.1}, rounds=5)
    >>> [round(factor(t), 3) for t in (1, 3, 5, 9)]
    [1.0, 0.55, 0.1, 0.1]
    >>> [make_schedule("warmup", {"warm": 4}, rounds=9)(t) for t in (1, 4, 9)]
    [0.25, 1.0, 1.0]
    """
    if name in _given:
        if options:
            raise BadInputError(f"lr_schedule_options = {dict(options)}: a function has none, leave them out")
        return functools.partial(_checked_factor, name, _given[name])
    if "#" in name:
        raise BadInputError(
            f"lr_schedule = {name!r} is a function that this program does not have: give the same function again"
        )
    return SCHEDULES.build(name, {"rounds": rounds}, options)


def name_of_schedule(function: Callable[[int], float]) -> str:
    """Keep a function of the round number for :func:`make_schedule`, and return its name with a digest of its source.

    >>> def halved(t):
    ...     return 0.5 ** (t - 1)
    >>> name = name_of_schedule(halved)
    >>> name.partition("#")[0], make_schedule(name, {}, rounds=3)(3)
    ('halved', 0.25)
    """
    text, _, digest = describe(function).partition(" ")
    name = f"{text.rpartition('.')[2]}#{digest or text}"
    if _given.setdefault(name, function) is not function and not digest:
        raise BadInputError(f"lr_schedule = {text}: another function of this name was given before: rename one")
    _given[name] = function
    return name


def _checked_factor(name: str, function: Schedule, t: int) -> float:
    try:
        factor: object = function(t)
    except Exception as error:
        raise BadInputError(
            f"lr_schedule = {name!r} fails in round {t}: {type(error).__name__}: {error}; give a function of the round "
            "number that returns a factor in (0, 1]"
        ) from error
    try:
        return check_probability("", factor, zero=False)
    except BadInputError:
        raise BadInputError(
            f"lr_schedule = {name!r} gives {factor!r} in round {t}: return a number in (0, 1], a factor on both rates"
        ) from None


def complete_schedule(name: str, options: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the options of a schedule for a record: where it ends is written down, whatever rounds are added later.

    >>> complete_schedule("cosine", {"final": 0.1}, rounds=50)
    {'final': 0.1, 'over': 50}
    """
    if name in _given:
        return {}
    complete = {**SCHEDULES.options(name), **options}
    if complete.get("then") == "constant":
        return {key: complete[key] for key in ("warm", "then")}
    return {key: rounds if key == "over" and value is None else value for key, value in complete.items()}


def _round_number(field: str, value: int | None, rounds: int) -> int:
    return rounds if value is None else check_int(field, value, 1)
