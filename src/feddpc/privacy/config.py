"""Differential privacy in a configuration: its options, what they rule out, and the mechanism they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feddpc.checks import check_positive, coerce
from feddpc.config import Config
from feddpc.errors import BadInputError, unknown
from feddpc.privacy import Mechanism, epsilon, noise_for
from feddpc.privacy.accounting import LEAST_NOISE

OPTIONS = ("clip", "noise", "epsilon", "delta")
#: How often the promise may fail, unless asked otherwise.
DELTA = 1e-5


def complete_privacy(config: Config) -> dict[str, Any]:
    """Return the privacy options of a configuration with all that follows from them, or say why they cannot hold."""
    if not config.privacy:
        return {}
    values = check_options(config.privacy)
    check_settings(config, values["delta"])
    return fill_noise(values, config.cohort / config.clients, config.rounds)


def check_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked options, with delta; the noise may still be open."""
    for key in table:
        if key not in OPTIONS:
            raise unknown("option of privacy", key, OPTIONS)
    if "clip" not in table or not {"noise", "epsilon"} & table.keys():
        raise BadInputError(
            "privacy needs privacy.clip, the longest update of a client, and one of privacy.epsilon (a budget for the "
            "whole run) and privacy.noise (a multiple of the clip)"
        )
    values = {k: check_positive(f"privacy.{k}", coerce(f"privacy.{k}", v, float)) for k, v in table.items()}
    values.setdefault("delta", DELTA)
    if values.get("noise", LEAST_NOISE) < LEAST_NOISE:
        raise BadInputError(
            f"privacy.noise = {values['noise']:g}: must be at least {LEAST_NOISE}, below which nothing is promised; "
            "leave privacy out for a run without noise"
        )
    return values


def fill_noise(values: Mapping[str, Any], sampling: float, rounds: int) -> dict[str, Any]:
    """Return checked options with the noise of a run in which a client takes part with probability ``sampling``.

    ``epsilon`` without ``noise`` asks for the least noise that keeps the whole run within it. With both, the noise is
    taken and the epsilon is a limit: so a run that is resumed for more rounds cannot spend more than was asked for.
    """
    run = sampling, rounds, values["delta"]
    if "noise" not in values:
        return {**values, "noise": noise_for(values["epsilon"], *run)}
    spent = epsilon(values["noise"], *run)
    if spent > values.get("epsilon", spent):
        raise BadInputError(
            f"privacy.noise = {values['noise']:g} spends epsilon {spent:.4g} in {rounds} rounds, more than "
            f"privacy.epsilon = {values['epsilon']:g}: ask for fewer rounds, or begin a new run with more noise"
        )
    return dict(values)


def make_mechanism(config: Config) -> Mechanism | None:
    """Return the mechanism of a complete configuration, None where it asks for no privacy."""
    if not config.privacy:
        return None
    named = {key: config.privacy[key] for key in ("clip", "noise", "delta")}
    return Mechanism(**named, cohort=config.cohort, population=config.clients)


def check_settings(config: Config, delta: float) -> None:
    """Refuse what would make the promise false."""
    if config.participation != "poisson":
        raise BadInputError(
            f"participation = {config.participation!r} cannot be run with privacy: the budget is counted for clients "
            "that come by independent coins, in rounds that may be empty: use participation = 'poisson'"
        )
    if config.weighting != "uniform":
        raise BadInputError(
            f"weighting = {config.weighting!r} cannot be run with privacy: a client's weight would tell its size, and "
            "change the others': use weighting = 'uniform'"
        )
    if config.scaling == "channel":
        raise BadInputError(
            "scaling = 'channel' cannot be run with privacy: it uses means and deviations of all clients' data, "
            "without noise: use 'half' or 'unit'"
        )
    if config.rule != "mean" or config.screen:
        raise BadInputError(
            "rule and screen cannot be run with privacy: what they do with one client's update depends on the others', "
            "and the budget is counted for a sum: leave them out, clipping bounds every update"
        )
    if delta >= 1 / config.clients:
        raise BadInputError(
            f"privacy.delta = {delta:g} with {config.clients} clients: must be below 1/{config.clients}, or "
            "publishing one client's data would satisfy the guarantee"
        )
