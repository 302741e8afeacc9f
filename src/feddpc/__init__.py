"""feddpc: federated learning when clients' data differ and few clients show up.

``feddpc.simulate`` trains your own module on your own data, ``feddpc.compare`` does so with several methods and seeds,
``feddpc.rerun`` repeats a run, ``feddpc.register`` adds a model, a data set, a partition or another part under a name
of its own. A ``feddpc.Callback`` follows runs and may stop them, as ``feddpc.EarlyStopping`` does. ``feddpc.Task`` is
the base of tasks of your own. ``feddpc.methods`` holds the methods, ``feddpc.models`` the networks, ``feddpc.data`` the
data sets, ``feddpc.quadratic`` the problem with closed-form answers. Everything is imported on first use, so that
``import feddpc`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from feddpc._version import __version__

if TYPE_CHECKING:
    from feddpc import data, methods, models, quadratic
    from feddpc.api import Comparison, Rerun, Result, compare, register, rerun, simulate
    from feddpc.callbacks import Callback, EarlyStopping
    from feddpc.config import Config
    from feddpc.data import Dataset
    from feddpc.data.partition import Partition
    from feddpc.methods import Method
    from feddpc.tasks.metrics import Metric
    from feddpc.tasks.network import NetworkTask as Task

__all__ = [
    "Callback",
    "Comparison",
    "Config",
    "Dataset",
    "EarlyStopping",
    "Method",
    "Metric",
    "Partition",
    "Rerun",
    "Result",
    "Task",
    "__version__",
    "compare",
    "data",
    "methods",
    "models",
    "quadratic",
    "register",
    "rerun",
    "simulate",
]

_HOMES = dict.fromkeys(("simulate", "rerun", "compare", "register", "Result", "Rerun", "Comparison"), "feddpc.api")
_HOMES |= dict.fromkeys(("Callback", "EarlyStopping"), "feddpc.callbacks")
_HOMES |= {"Config": "feddpc.config", "Dataset": "feddpc.data", "Method": "feddpc.methods"}
_HOMES |= {"Partition": "feddpc.data.partition", "Metric": "feddpc.tasks", "Task": "feddpc.tasks.network"}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), "NetworkTask" if name == "Task" else name)
    if name in __all__:
        return importlib.import_module(f"feddpc.{name}")
    raise AttributeError(f"module 'feddpc' has no attribute {name!r}")
