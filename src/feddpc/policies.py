"""What an experiment does to uploads beyond the method's own rule: simulated faults, defenses, differential privacy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from feddpc.config import Config
from feddpc.privacy import Mechanism
from feddpc.privacy.config import complete_privacy, make_mechanism
from feddpc.robust import defense, faults, rules
from feddpc.robust.defense import Defense
from feddpc.robust.faults import Faults


@dataclass(frozen=True)
class Policies:
    """What stands between the uploads and the server's step; None means that it is not used."""

    defense: Defense | None = None  #: how the server protects itself, beyond rejecting what is not finite
    privacy: Mechanism | None = None  #: what makes the models differentially private
    faults: Faults | None = None  #: which clients misbehave, in simulations of that

    def __bool__(self) -> bool:
        """Return whether any of them is used."""
        return any(policy is not None for policy in (self.defense, self.privacy, self.faults))

    @classmethod
    def of(cls, config: Config) -> Policies:
        """Return the policies of a resolved configuration."""
        return cls(
            defense=defense.make(rules.make(config.rule, **config.rule_options), config.screen),
            privacy=make_mechanism(config),
            faults=faults.make(config.faults, population=config.clients, seed=config.seed),
        )


def resolve_policies(config: Config) -> Config:
    """Fill in every option of the rule, the bound on norms, the faults and privacy."""
    config = dataclasses.replace(
        config,
        rule_options=rules.options(config.rule) | config.rule_options,
        screen=defense.complete(config.screen),
        faults=faults.complete(config.faults),
    )
    return dataclasses.replace(config, privacy=complete_privacy(config))
