"""Which methods an unchanged client app can serve, found out by looking at their hooks and trying them."""

from __future__ import annotations

from typing import get_args, get_type_hints

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import DATA_HOOKS, ClientContext, Cohort, Method, overrides

#: What the client half of a method consists of, but for ``broadcast`` and ``finish``.
CLIENT_HOOKS = ("start", "objective", "correct", "step", "init_client", "probes", "surveys", "probe_mask", "train_mask")


def sends_plain_updates(method: Method) -> bool:
    """Say whether clients of ``method`` run plain local SGD and send nothing but their update.

    >>> from feddpc import methods
    >>> [sends_plain_updates(methods.create(name)) for name in ("feddpc", "fedprox", "mifa")]
    [True, False, True]
    >>> sends_plain_updates(methods.create("feddpc", form="client"))
    False
    """
    if any(overrides(method, hook) for hook in (*CLIENT_HOOKS, *DATA_HOOKS)):
        return False
    w, y = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    # These two may do something of their own for some hyper-parameters only: let them say.
    if overrides(method, "broadcast") and method.broadcast(w, method.init_server(w, 2), {}, cohort_of(2)):
        return False
    up, own = method.finish(y, ClientContext(w, {}, {}, 0.1, torch.tensor(1.0)))
    return not own and up.keys() == {"delta"} and torch.equal(up["delta"], w - y)


def knows_clients(method: Method) -> bool:
    """Say whether the server of ``method`` remembers something of every client, so that it must know how many."""
    w = torch.zeros(2)
    try:
        few, many = ({k: v.shape for k, v in method.init_server(w, n).items()} for n in (10_000, 10_001))
    except BadInputError:  # it asks for one particular number of clients
        return True
    return few != many or bool(method.init_slot(w))


def streams(cls: type[Method]) -> bool:
    """Say whether a method's server can take updates one at a time."""
    return "streaming" in get_args(get_type_hints(cls)["form"])


def cohort_of(m: int, population: int = 2, method: Method | None = None, w: Tensor | None = None) -> Cohort:
    """Return a cohort to try a method on."""
    rest = {} if method is None or w is None else method.init_slot(w)
    return Cohort(
        round=1,
        clients=torch.arange(m),
        population=population,
        weights=torch.full((m,), 1 / m, dtype=torch.float64),
        steps=torch.full((m,), torch.nan, dtype=torch.float64),
        client_lr=1.0,
        server_lr=1.0,
        slots={k: v.expand(m, *v.shape).clone() for k, v in rest.items()},
    )
