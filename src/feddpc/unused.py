"""Settings that would do nothing are refused: a user who gives one expects that it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feddpc.config import Config
from feddpc.errors import BadInputError

#: Keys that decide whether others count.
ENABLING = ("data", "partition", "evaluate_clients")


def refuse_unused(given: Sequence[tuple[Mapping[str, Any], Config]]) -> None:
    """Raise if a setting that the user gave counts in none of the runs.

    Each run is what the user gave for it, and its resolved configuration. A value that is the default is accepted,
    because the ``config.toml`` of every run holds it.
    """
    for key in ("alpha", "client_test", "clients"):
        complaints = [_complaint(key, values[key], config) for values, config in given if _differs(key, values, config)]
        if complaints and all(complaints):
            raise BadInputError(complaints[0])


def _differs(key: str, values: Mapping[str, Any], config: Config) -> bool:
    """Say whether ``key`` was given with a value that the run would not have without it."""
    usual = config.clients if key == "clients" else getattr(Config, key)
    return key in values and values[key] != usual


def _complaint(key: str, value: Any, config: Config) -> str:
    """Say why ``value`` of ``key`` does not count in a run; nothing if it does."""
    partition, options = config.partition, config.partition_options
    if key == "alpha" and "alpha" not in options:
        return f"alpha = {value}: partition = {partition!r} has no alpha: leave alpha out, or choose another partition"
    if key == "alpha" and options["alpha"] != config.alpha:
        return f"alpha = {value} and partition_options.alpha = {options['alpha']}: give one of them"
    if key == "client_test" and not config.evaluate_clients:
        return f"client_test = {value} counts only with evaluate_clients = true: set that too, or leave client_test out"
    if key == "clients" and partition in ("natural", "given"):
        whose = "the data are those of" if partition == "natural" else "the partition is that of"
        return f"clients = {value}, but {whose} {config.clients} clients: give that, or leave clients out"
    return ""
