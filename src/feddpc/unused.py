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
        complaints = [_complaint(key, config) for values, config in given if _differs(key, values, config)]
        if complaints and all(complaints):
            raise BadInputError(complaints[0])


def _differs(key: str, values: Mapping[str, Any], config: Config) -> bool:
    """Say whether ``key`` was given with a value that the run would not have without it."""
    usual = config.clients if key == "clients" else getattr(Config, key)
    return key in values and values[key] != usual


def _complaint(key: str, config: Config) -> str:
    """Say why ``key`` does not count in a run; nothing if it does."""
    if key == "alpha" and "alpha" not in config.partition_options:
        return f"alpha = {config.alpha}: partition = {config.partition!r} has no alpha: leave alpha out"
    if key == "alpha" and config.partition_options["alpha"] != config.alpha:
        return f"alpha = {config.alpha} and partition_options.alpha = {config.partition_options['alpha']}: give one"
    if key == "client_test" and not config.evaluate_clients:
        return f"client_test = {config.client_test}: is for evaluate_clients = true: set that too, or leave it out"
    if key == "clients" and config.partition == "natural":
        return f"clients: the data are those of {config.clients} clients: give clients = that, or leave it out"
    return ""
