"""Everything that a configuration chooses by name, and how to add to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from feddpc import methods
from feddpc.data.loading import DATA
from feddpc.data.schemes import PARTITIONS
from feddpc.engines.base import Engine
from feddpc.errors import unknown, wrong_type
from feddpc.methods.base import Method
from feddpc.models import MODELS
from feddpc.registry import Registry
from feddpc.robust.rules import RULES
from feddpc.runs.engine_choice import ENGINES
from feddpc.sampling import SAMPLERS
from feddpc.tasks.augmentation import TRANSFORMS
from feddpc.tasks.kinds import TASKS
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import FUNCTIONS
from feddpc.tasks.network import NetworkTask

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


#: The class that things of a kind are subclasses of.
BASES: dict[str, type[Any]] = {"method": Method, "task": NetworkTask, "engine": Engine}
#: How many arguments the functions of a kind get by their place, and what such a function is.
FUNCTIONS_OF = {
    "sampler": (1, "a function of the pool of clients that returns a function of the round"),
    "rule": (0, "a function of options, all with defaults, that returns a function of the rows of a cohort"),
    "loss": (2, "a function of outputs and targets"),
    "metric": (2, "a function of outputs and targets"),
    "transform": (2, "a function of inputs and uniform random numbers"),
}


def _takes(thing: Callable[..., Any], kind: str) -> bool:
    """Say whether a function can be called with the arguments of its kind."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # one of an extension, which does not say
        return True
    placed = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    try:
        signature.replace(parameters=placed).bind(*range(FUNCTIONS_OF[kind][0]))
    except TypeError:
        return False
    return True


def register(kind: str, name: str, thing: Any = None) -> Any:
    """Make ``thing`` known by ``name`` to :func:`simulate`, the configuration and the command line of this process.

    What ``thing`` must be:

    * ``method``: a subclass of :class:`Method`
    * ``model``: a module class, or a function that returns a module; it gets what it names of ``classes``,
      ``channels``, ``size`` and ``shape``
    * ``data``: a function that returns a :class:`Dataset` or (x_train, y_train, x_test, y_test)
    * ``partition``: a function of ``labels``, ``clients`` and ``seed`` that returns a list with the sample indices
      of each client
    * ``sampler``: a function of a ``ClientPool`` that returns a function of the round, which returns the invited
      clients
    * ``rule``: a function of options, all with defaults, that returns a function of the rows of a cohort, which
      returns a ``RuleOutcome``
    * ``task``: a subclass of :class:`NetworkTask`
    * ``loss``: a function of outputs and targets that returns one value per sample, or per sample and token
    * ``metric``: a function of all outputs and targets that returns a number
    * ``transform``: a function of the inputs of a batch and uniform random numbers that returns inputs
    * ``engine``: a subclass of ``Engine``

    Other parameters with defaults are options: ``model_options={...}``, ``--set model.KEY=VALUE``. Without ``thing``,
    this is a decorator.

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
    if kind in BASES:
        base = BASES[kind]
        fits = isinstance(thing, type) and issubclass(thing, base)
        if not fits:
            raise wrong_type(kind, thing, f"a subclass of {base.__module__}.{base.__name__}")
        if kind == "method":
            thing.name = thing.name or name
        if kind == "engine" and "name" not in vars(thing):
            thing.name = name  # not that of the engine that it is derived from
    elif kind in FUNCTIONS_OF and callable(thing) and (isinstance(thing, type) or not _takes(thing, kind)):
        raise wrong_type(kind, thing, FUNCTIONS_OF[kind][1])
    return REGISTRIES[kind].register(name, thing)
