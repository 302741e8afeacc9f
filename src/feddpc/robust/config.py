"""Faults and defenses in a configuration: what they say in full, and what they stand for."""

from __future__ import annotations

import dataclasses

from feddpc.config import Config
from feddpc.robust import defense, faults, rules
from feddpc.robust.defense import Defense
from feddpc.robust.faults import Faults


def complete_policies(config: Config) -> Config:
    """Fill in every option of the rule, the bound on norms and the faults."""
    return dataclasses.replace(
        config,
        rule_options=rules.options(config.rule) | config.rule_options,
        screen=defense.complete(config.screen),
        faults=faults.complete(config.faults),
    )


def defense_of(config: Config) -> Defense | None:
    """Return how the server protects itself."""
    return defense.make(rules.make(config.rule, **config.rule_options), config.screen)


def faults_of(config: Config, population: int) -> Faults | None:
    """Return which clients misbehave."""
    return faults.make(config.faults, population=population, seed=config.seed)
