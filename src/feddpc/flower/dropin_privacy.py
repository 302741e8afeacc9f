"""Differential privacy in a drop-in strategy: the simulator's mechanism and accountant, for nodes drawn by coins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.methods.base import Method
from feddpc.privacy import Mechanism
from feddpc.privacy.config import check_options, check_settings, fill_noise
from feddpc.privacy.mechanism import check as check_method
from feddpc.runs.record import is_run, load_config


class DropInPrivacy:
    """What a drop-in strategy promises, and the mechanism that keeps it once the number of rounds is known.

    Every connected node takes part in a round by a coin of its own, with probability ``fraction``; the sum is divided
    by the expected number of participants of a population of ``clients``, however many nodes take part.
    """

    def __init__(self, table: Mapping[str, Any], *, clients: int | None, fraction: float) -> None:
        if not isinstance(table, Mapping):
            raise BadInputError(
                f"privacy = {table!r}: must be a table such as {{'clip': 0.5, 'epsilon': 8.0}}, or None for no privacy"
            )
        if clients is None:
            raise BadInputError(
                "privacy needs population, how many clients there are: the noisy sum is divided by fraction_train "
                "times that number, whoever comes"
            )
        if not 0 < fraction <= 1:
            raise BadInputError(
                f"fraction_train = {fraction} with privacy: it is the probability with which a node takes part, above "
                "0 and at most 1"
            )
        self.asked = check_options(table)
        self.clients, self.fraction, self.values = clients, fraction, dict(self.asked)

    def check(self, method: Method, config: Config, *, min_replies: int, min_train_nodes: int) -> None:
        """Refuse a method that cannot have it, and settings with which the promise would be false."""
        check_method(method)
        check_settings(dataclasses.replace(config, clients=self.clients, cohort=1), self.asked["delta"])
        if min_replies > 1:
            raise BadInputError(
                f"min_replies = {min_replies} cannot be run with privacy: one client more or less would decide whether "
                "all the others count, and the budget is counted for one: leave it out"
            )
        if min_train_nodes > 2:  # Flower's default
            raise BadInputError(
                f"min_train_nodes = {min_train_nodes} cannot be run with privacy: every node takes part by a coin of "
                "its own, and the budget is counted for that: leave it out and set fraction_train"
            )

    def mechanism(self, rounds: int, folder: Path | None) -> Mechanism:
        """Return the mechanism of a run of so many rounds.

        A run in ``folder`` that is continued keeps its noise, and more rounds than its budget covers are refused.
        """
        values = dict(self.asked)
        if "noise" not in values and folder is not None and is_run(folder):
            stored = load_config(folder).privacy
            values |= {"noise": stored["noise"]} if "noise" in stored else {}
        self.values = fill_noise(values, self.fraction, rounds)
        known = {key: self.values[key] for key in ("clip", "noise", "delta")}
        cohort = self.fraction * self.clients
        return Mechanism(**known, cohort=cohort, population=self.clients, reproducible=False)

    def describe(self) -> dict[str, Any]:
        """Return the keys of the configuration that say what is promised."""
        cohort = max(1, round(self.fraction * self.clients))
        return {"privacy": self.values, "participation": "poisson", "clients": self.clients, "cohort": cohort}
