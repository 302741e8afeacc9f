"""From the simulator to a real federation: feddpc's methods over Flower.

``FedDPC`` (and the same for every method whose clients run plain local SGD) stands in for Flower's own ``FedAvg`` with
an unchanged client app; ``strategy``, ``server_app`` and ``client_app`` run any registered method, its client half at
the client; ``InProcessGrid`` runs an app in one process, and on a ``FaultyGrid`` some nodes misbehave. Flower itself,
the extra ``flower``, is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from feddpc.errors import FeddpcError
from feddpc.flower.versions import check_flwr

_HOMES = {
    "FaultyGrid": "feddpc.flower.faulty",
    "InProcessGrid": "feddpc.flower.grid",
    "VoidRoundsError": "feddpc.flower.screening",
    "buffer_names": "feddpc.flower.buffers",
    "client_app": "feddpc.flower.client",
    "dealt": "feddpc.flower.sources",
    "secure_client_app": "feddpc.flower.secure.client",
    "secure_server_app": "feddpc.flower.secure.server",
    "secure_strategy": "feddpc.flower.secure.server",
    "server_app": "feddpc.flower.server",
    "strategy": "feddpc.flower.server",
}


def __dir__() -> list[str]:
    try:
        check_flwr()
    except FeddpcError:  # the names of the drop-ins come from Flower
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
