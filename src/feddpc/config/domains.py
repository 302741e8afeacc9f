"""Which values the keys of a configuration may have, alone and together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from feddpc.errors import BadInputError

if TYPE_CHECKING:
    from feddpc.config.fields import Config


def check_domains(config: Config) -> None:
    """Raise if a key has a value outside its domain, or one that does not go with that of another key."""
    for name in ("clients", "cohort", "rounds", "epochs", "batch_size", "threads", "evaluate_every"):
        value = getattr(config, name)
        _require(value is None or value == "auto" or value >= 1, name, value, "at least 1")
    _require(not isinstance(config.threads, int) or config.threads <= 1024, "threads", config.threads, "at most 1024")
    # Data with client ids may hold more clients than the default; `resolve` compares the cohort with what they hold.
    data_decide = config.partition in ("auto", "natural") and config.clients == type(config).clients
    if not data_decide:
        check_cohort(config.cohort, config.clients)
    for name in ("lr", "server_lr", "alpha", "lr_decay", "clip_norm"):
        value = getattr(config, name)
        _require(value is None or 0 < value < math.inf, name, value, "a finite number above 0")
    _require(config.finetune_steps >= 0, "finetune_steps", config.finetune_steps, "at least 0")
    _require(0 < config.client_test < 1, "client_test", config.client_test, "a share of samples above 0 and below 1")
    alone = config.evaluate_clients or not config.finetune_steps
    _require(alone, "finetune_steps", config.finetune_steps, "0 without evaluate_clients = true")
    both = config.lr_decay != 1 and config.lr_schedule != "constant"
    _require(not both, "lr_decay", config.lr_decay, f"left out with lr_schedule = {config.lr_schedule!r}")
    _require(0 <= config.dropout < 1, "dropout", config.dropout, "a probability in [0, 1)")
    reserve = 0.0 if config.reserve is None else config.reserve
    _require(0 <= reserve < 1, "reserve", config.reserve, "a share of the training set in [0, 1)")
    _require(0 <= config.validation < 1, "validation", config.validation, "a share of the training set in [0, 1)")
    alike = config.rule == "mean" or config.weighting == "uniform"
    _require(alike, "weighting", config.weighting, f"uniform with rule = {config.rule!r}, which counts clients alike")
    _require(0 <= config.seed < 2**32, "seed", config.seed, "from 0 to 4294967295")


def check_cohort(cohort: int, clients: int) -> None:
    """Raise if there are fewer clients than are to take part in a round."""
    _require(cohort <= clients, "cohort", cohort, f"at most clients = {clients}")


def one_rate(values: dict[str, Any], client_lr: float | None) -> dict[str, Any]:
    """Return ``values`` with the local learning rate, which has two names: ``lr`` and ``client_lr``."""
    if client_lr is None:
        return values
    if "lr" in values:
        raise BadInputError(f"lr = {values['lr']} and client_lr = {client_lr} are the same setting: give one of them")
    return {**values, "lr": client_lr}


def _require(holds: bool, name: str, value: object, domain: str) -> None:
    if not holds:
        raise BadInputError(f"{name} = {value!r}: must be {domain}")
