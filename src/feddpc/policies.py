"""What an experiment does beyond the method's own rule: simulated faults, defenses, privacy, a server optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.optimizers import (
    CLIENT_OPTIMIZERS,
    SERVER_OPTIMIZERS,
    ClientOptimizer,
    ServerOptimizer,
    complete_options,
    make_client_optimizer,
    make_server_optimizer,
)
from feddpc.privacy import Mechanism
from feddpc.privacy.config import complete_privacy, make_mechanism
from feddpc.robust import defense, faults, rules
from feddpc.robust.defense import Defense
from feddpc.robust.faults import Faults
from feddpc.schedules import complete_schedule, make_schedule

#: Ways to sample that never invite more clients than the cohort.
FIXED_SIZE = ("uniform", "cyclic", "markov", "weighted")


@dataclass(frozen=True)
class Policies:
    """What stands between the uploads and the new model; None means that it is not used."""

    defense: Defense | None = None  #: how the server protects itself, beyond rejecting what is not finite
    privacy: Mechanism | None = None  #: what makes the models differentially private
    faults: Faults | None = None  #: which clients misbehave, in simulations of that
    optimizer: ServerOptimizer | None = None  #: what makes a step of the method's direction

    def __bool__(self) -> bool:
        """Return whether any of them stands between the uploads and the method's server rule."""
        return any(policy is not None for policy in (self.defense, self.privacy, self.faults))

    @classmethod
    def of(cls, config: Config) -> Policies:
        """Return the policies of a resolved configuration."""
        return cls(
            defense=defense.make(rules.make(config.rule, **config.rule_options), config.screen),
            privacy=make_mechanism(config),
            faults=faults.make(config.faults, population=config.clients, seed=config.seed),
            optimizer=server_optimizer(config),
        )


def largest_cohort(config: Config) -> int:
    """Return how many clients a round invites at most."""
    return config.cohort if config.participation in FIXED_SIZE else config.clients


def client_optimizer(config: Config) -> ClientOptimizer:
    """Return how clients make local steps."""
    return make_client_optimizer(config.client_optimizer, config.client_optimizer_options, config.clip_norm)


def server_optimizer(config: Config) -> ServerOptimizer | None:
    """Return how the server makes a step of a method's direction; None: as the method says."""
    return make_server_optimizer(config.server_optimizer, config.server_optimizer_options)


def resolve_policies(config: Config, usual_server_lr: float | None = None) -> Config:
    """Fill in every option of optimizers, schedule, rule, bound on norms, faults and privacy, and the server's rate.

    ``usual_server_lr`` is the rate that the method has unless the configuration or a server optimizer says otherwise.
    """
    client_optimizer(config)
    factor = make_schedule(config.lr_schedule, config.lr_schedule_options, config.rounds)
    for t in range(1, config.rounds + 1) if config.lr_schedule != "constant" else ():
        factor(t)
    select, most = config.rule_options.get("select", 0), largest_cohort(config)
    if isinstance(select, int) and select > most:
        raise BadInputError(
            f"rule_options.select = {select}: at most {most} clients answer in a round, so {config.rule} would select "
            "nothing: lower it"
        )
    adaptive, server_lr = server_optimizer(config), config.server_lr
    if server_lr is None:
        usual = None if adaptive is None else adaptive.server_lr
        server_lr = usual or usual_server_lr or config.lr
    return dataclasses.replace(
        config,
        server_lr=server_lr,
        rule_options=rules.options(config.rule) | config.rule_options,
        screen=defense.complete(config.screen),
        faults=faults.complete(config.faults),
        privacy=complete_privacy(config),
        lr_schedule_options=complete_schedule(config.lr_schedule, config.lr_schedule_options, config.rounds),
        client_optimizer_options=complete_options(
            CLIENT_OPTIMIZERS, config.client_optimizer, config.client_optimizer_options
        ),
        server_optimizer_options=complete_options(
            SERVER_OPTIMIZERS, config.server_optimizer, config.server_optimizer_options
        ),
    )
