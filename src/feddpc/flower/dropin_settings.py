"""What a drop-in strategy accepts: methods, settings, models, differential privacy. It refuses the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddpc.config import Config
from feddpc.errors import BadInputError, RunFolderError
from feddpc.flower.method_traits import counts_steps, knows_clients, sends_plain_updates
from feddpc.methods.base import Method
from feddpc.privacy import Mechanism
from feddpc.privacy.config import check_options, check_settings, fill_noise
from feddpc.privacy.mechanism import check as check_private_method
from feddpc.runs.record import is_run, load_config


def check_method(method: Method, weighting: str, clients: int | None, *, robust: bool) -> None:
    """Refuse methods and settings that do not work with an unchanged client app."""
    if not sends_plain_updates(method):
        raise BadInputError(
            f"{method.name} with {method.hyper()} has a client half of its own: use feddpc.flower.strategy and "
            "client_app"
        )
    if knows_clients(method) and clients is None:
        raise BadInputError(f"{method.name} remembers every client: say how many there are, population=...")
    if weighting not in ("uniform", "samples"):
        raise BadInputError(f"weighting = {weighting!r}: must be 'uniform' or 'samples'")
    if robust:
        method.check_rule()
    if weighting == "samples" and knows_clients(method):
        raise BadInputError(
            f"{method.name} with weighting='samples' needs the sizes of clients that never came: use 'uniform'"
        )
    if counts_steps(method, clients or 2):
        raise BadInputError(
            f"{method.name} with {method.hyper()} needs every client's number of local steps, which a client app of "
            "Flower does not tell: use feddpc.flower.strategy and client_app"
        )


def read_screen(screen: object) -> dict[str, Any]:
    """Return the bound on norms that an argument asks for; None and False are none.

    >>> read_screen({"norm": 5}), read_screen(None)
    ({'norm': 5}, {})
    """
    if screen is None or screen is False:
        return {}
    if not isinstance(screen, Mapping):
        raise BadInputError(f"screen = {screen!r}: must be a table such as {{'norm': 30}}, or None for no bound")
    return dict(screen)


def refuse_other_settings(folder: Path | None, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise if the run in ``folder`` was begun with other settings; those that its release did not store are free."""
    if different := [
        f"{name} = {now[name]}, was {before[name]}" for name in now if before.get(name, now[name]) != now[name]
    ]:
        raise RunFolderError(
            f"{folder} was made with another configuration ({'; '.join(different)}): choose another folder=, or give "
            "these settings as they were"
        )


def check_buffers(name: str, policy: str, judges: Mapping[str, object], *, private: bool) -> None:
    """Refuse a model with buffer ``name`` where buffers are not wanted, and where averaging bypasses a defense.

    ``judges`` are the settings that judge updates, and whether they were asked for.
    """
    groups = "convert the model with feddpc.models.to_groupnorm"
    if policy == "refuse":
        raise BadInputError(f"buffers = 'refuse', and array {name!r} of the model is one: {groups}")
    if policy != "average":
        return
    if private:
        raise BadInputError(
            f"buffers = 'average' with privacy: the mean of buffers such as {name!r} would leave the server without "
            f"noise. Use buffers = 'local', or {groups}"
        )
    if given := [setting for setting, asked in judges.items() if asked]:
        raise BadInputError(
            f"buffers = 'average' with {' and '.join(given)}: these judge updates and do not see buffers such as "
            f"{name!r}, so that one client could set them at will. Use buffers = 'local', or {groups}"
        )


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
                "times that number, however many take part"
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
        check_private_method(method)
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
