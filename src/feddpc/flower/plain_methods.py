"""Which methods an unchanged client app can serve: found by looking at their hooks, and at what these return."""

from __future__ import annotations

from typing import get_args, get_type_hints

import torch

from feddpc.errors import BadInputError
from feddpc.flower.templates import trial_cohort
from feddpc.methods.base import DATA_HOOKS, ClientContext, Method, overrides

#: The hooks of a method's client half, except ``broadcast`` and ``finish``.
CLIENT_HOOKS = (
    *("start", "objective", "correct", "local_direction", "step", "init_client"),
    *("probes", "surveys", "probe_mask", "train_mask"),
)


def sends_plain_updates(method: Method) -> bool:
    """Return whether clients of ``method`` run plain local SGD and send only their update.

    >>> from feddpc import methods
    >>> [sends_plain_updates(methods.create(name)) for name in ("feddpc", "fedprox", "mifa")]
    [True, False, True]
    >>> sends_plain_updates(methods.create("feddpc", form="client"))
    False
    """
    if any(overrides(method, hook) for hook in (*CLIENT_HOOKS, *DATA_HOOKS)):
        return False
    w, y = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    # Whether these two do something of their own may depend on hyper-parameters: call them.
    if overrides(method, "broadcast") and method.broadcast(w, method.init_server(w, 2), {}, trial_cohort(2)):
        return False
    up, own = method.finish(y, ClientContext(w, {}, {}, 0.1, torch.tensor(1.0)))
    return not own and up.keys() == {"delta"} and torch.equal(up["delta"], w - y)


def knows_clients(method: Method) -> bool:
    """Return whether the server of ``method`` stores something per client, so that it must know how many there are."""
    w = torch.zeros(2)
    try:
        few, many = ({k: v.shape for k, v in method.init_server(w, n).items()} for n in (10_000, 10_001))
    except BadInputError:  # it asks for one particular number of clients
        return True
    return few != many or bool(method.init_slot(w))


def counts_steps(method: Method, population: int) -> bool:
    """Return whether the server of ``method`` must know how many local steps each client made."""
    w = torch.ones(2)
    cohort = trial_cohort(1, population, method.init_slot(w))
    step = method.aggregate(w, method.init_server(w, population), {"delta": torch.eye(2)[:1]}, cohort)
    return not bool(step.update.isfinite().all())


def streams(cls: type[Method]) -> bool:
    """Return whether a method's server can take updates one at a time."""
    return "streaming" in get_args(get_type_hints(cls)["form"])
