"""Which methods, settings and models a drop-in strategy refuses, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddpc.errors import BadInputError, RunFolderError
from feddpc.flower.plain_methods import counts_steps, knows_clients, sends_plain_updates
from feddpc.methods.base import Method


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
