"""Faults and defences in a configuration: what they say in full, and what they stand for."""

from __future__ import annotations

import dataclasses

from feddpc.robust import defence, faults, rules
from feddpc.robust.defence import Defence
from feddpc.robust.faults import Faults
from feddpc.run.config import Config


def complete(config: Config) -> Config:
    """Fill in every option of the rule, the bound on norms and the faults."""
    return dataclasses.replace(
        config,
        rule_options=rules.options(config.rule) | config.rule_options,
        screen=defence.complete(config.screen),
        faults=faults.complete(config.faults),
    )


def defence_of(config: Config) -> Defence | None:
    """Return how the server protects itself."""
    return defence.make(rules.make(config.rule, **config.rule_options), config.screen)


def faults_of(config: Config, population: int) -> Faults | None:
    """Return which clients misbehave."""
    return faults.make(config.faults, population=population, seed=config.seed)
