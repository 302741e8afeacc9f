"""feddpc's methods over Flower, in a real federation.

``FedDPC`` (and likewise every method whose clients run plain local SGD) replaces Flower's own ``FedAvg`` with an
unchanged client app. ``strategy``, ``server_app`` and ``client_app`` run any registered method, with its client half at
the clients. ``InProcessGrid`` runs an app in one process, and on a ``FaultyGrid`` some nodes misbehave. Flower itself,
the extra ``flower``, is imported on first use.
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from feddpc.errors import BadInputError, FeddpcError
from feddpc.flower import versions as versions  # needs no Flower

_HOMES = {
    "FaultyGrid": "feddpc.flower.testing",
    "InProcessGrid": "feddpc.flower.testing",
    "VoidRoundsError": "feddpc.flower.screening",
    "buffer_names": "feddpc.flower.layout",
    "client_app": "feddpc.flower.client",
    "app_arguments": "feddpc.flower.server",
    "secure_client_app": "feddpc.flower.secure.client",
    "secure_server_app": "feddpc.flower.secure.server",
    "secure_strategy": "feddpc.flower.secure.server",
    "server_app": "feddpc.flower.server",
    "strategy": "feddpc.flower.server",
}
#: Supported releases of Flower: from the first one on, below the second one; the extra ``flower`` says the same.
SUPPORTED = ((1, 41), (1, 43))


def check_flwr(version: str | None = None) -> None:
    """Raise if Flower is missing or not a supported release; ``found`` is by default the installed one.

    >>> check_flwr("1.41.0")
    >>> check_flwr("1.5.0")
    Traceback (most recent call last):
    feddpc.errors.BadInputError: flwr 1.5.0 is not supported, 1.41 up to (not) 1.43 is: pip install 'flwr>=1.41,<1.43'
    """
    low, high = SUPPORTED
    names = [".".join(map(str, bound)) for bound in SUPPORTED]
    install = f"pip install 'flwr>={names[0]},<{names[1]}'"
    if version is None:
        try:
            version = metadata.version("flwr")
        except metadata.PackageNotFoundError:
            raise BadInputError(f"feddpc.flower needs Flower, which is not installed: {install}") from None
    if not low <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < high:
        raise BadInputError(f"flwr {version} is not supported, {names[0]} up to (not) {names[1]} is: {install}")


def __dir__() -> list[str]:
    try:
        check_flwr()
    except FeddpcError:  # without Flower there are no drop-ins
        return sorted({*globals(), *_HOMES})
    return sorted({*globals(), *_HOMES, *importlib.import_module("feddpc.flower.dropin").dropins()})


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    check_flwr()
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    dropins = importlib.import_module("feddpc.flower.dropin").dropins()
    if name in dropins:
        return dropins[name]
    raise AttributeError(f"module 'feddpc.flower' has no attribute {name!r}; it has {', '.join([*_HOMES, *dropins])}")
