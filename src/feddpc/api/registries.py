"""Everything that a configuration chooses by name, and how to add to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from feddpc import methods
from feddpc.data.loading import DATA
from feddpc.data.schemes import PARTITIONS
from feddpc.errors import unknown, wrong_type
from feddpc.methods.base import Method
from feddpc.models import MODELS
from feddpc.registry import Registry
from feddpc.robust.rules import RULES
from feddpc.runs.engine_choice import ENGINES
from feddpc.sampling import SAMPLERS
from feddpc.tasks.kinds import TASKS
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import FUNCTIONS
from feddpc.tasks.network import TRANSFORMS

#: Everything that a configuration chooses by name.
REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods.METHODS,
    "model": MODELS,
    "data": DATA,
    "partition": PARTITIONS,
    "sampler": SAMPLERS,
    "rule": RULES,
    "task": TASKS,
    "loss": LOSSES,
    "metric": FUNCTIONS,
    "transform": TRANSFORMS,
    "engine": Registry("engine", cast(dict[str, Callable[..., Any]], ENGINES)),
}


def register(kind: str, name: str, thing: Any = None) -> Any:
    """Make ``thing`` known by ``name`` to :func:`simulate`, the configuration and the command line of this process.

    ``kind`` is method, model, data, partition, sampler, rule, task, loss, metric, transform or engine. A model is a
    module class, or a function that returns a module; it gets what it names of ``classes``, ``channels``, ``size`` and
    ``shape``. A data set is a function that returns a :class:`Dataset` or (x_train, y_train, x_test, y_test). A
    partition is a function of ``labels``, ``clients`` and ``seed`` that returns a list with the sample indices of each
    client. A loss is a function of outputs and targets that returns one value per sample, or per sample and token; a
    metric one of all outputs and targets. Other parameters with defaults are options: ``model_options={...}``,
    ``--set model.KEY=VALUE``. Without ``thing``, this is a decorator.

    >>> @register("partition", "alternating")
    ... def alternating(labels, clients):
    ...     return [range(j, len(labels), clients) for j in range(clients)]
    >>> from feddpc import simulate
    >>> simulate(rounds=1, clients=20, cohort=2, partition="alternating", engine="loop").status
    'finished'
    >>> del REGISTRIES["partition"].entries["alternating"]
    """
    if kind not in REGISTRIES:
        raise unknown("kind", kind, REGISTRIES)
    if thing is None:
        return functools.partial(register, kind, name)
    if kind == "method":
        if not (isinstance(thing, type) and issubclass(thing, Method)):
            raise wrong_type("method", thing, "a subclass of feddpc.Method")
        thing.name = thing.name or name
    return REGISTRIES[kind].register(name, thing)
