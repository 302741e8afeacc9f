"""Drop-in replacements for Flower's FedAvg: one class for every method whose clients run plain local SGD."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields

from feddpc import methods
from feddpc.flower.dropin_strategy import DropInStrategy
from feddpc.flower.method_traits import counts_steps, knows_clients, sends_plain_updates
from feddpc.methods.base import Method


@functools.cache
def dropins() -> dict[str, type[DropInStrategy]]:
    """Return the strategies by class name, one for every registered method that an unchanged client app can serve.

    >>> sorted(dropins())
    ['ClusterFedVARP', 'FedAdagrad', 'FedAdam', 'FedAvg', 'FedAvgM', 'FedDPC', 'FedExP', 'FedVARP', 'FedYogi', 'MIFA']
    """
    instances = [methods.create(name) for name in methods.names()]
    plain = [method for method in instances if sends_plain_updates(method)]
    served = [type(method) for method in plain if knows_clients(method) or not counts_steps(method, 2)]
    return {cls.__name__: _make_strategy(cls) for cls in served}


def _make_strategy(cls: type[Method]) -> type[DropInStrategy]:
    own = [p for n, p in inspect.signature(DropInStrategy.__init__).parameters.items() if n not in ("self", "hyper")]
    kind = inspect.Parameter.KEYWORD_ONLY
    hyper = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(cls)]
    doc = f"{cls.title} in the place of Flower's FedAvg.\n\n{inspect.cleandoc(DropInStrategy.__doc__ or '')}"
    about = {"made_from": cls, "__doc__": doc, "__module__": "feddpc.flower"}
    return type(cls.__name__, (DropInStrategy,), about | {"__signature__": inspect.Signature([*own, *hyper])})
