"""What a method needs of clients and server, found by trying its hooks: what clients send, and who can serve it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import DATA_HOOKS, ClientContext, Cohort, Method, State, overrides
from feddpc.tasks.base import Batch, BatchIndices, Task

#: The hooks of a method's client half, except ``broadcast`` and ``finish``.
CLIENT_HOOKS = (
    *("start", "objective", "correct", "local_direction", "step", "init_client"),
    *("probes", "surveys", "probe_mask", "train_mask"),
)


class RemoteTask(Task):
    """The task of clients on other machines: it has the right size, and gradients that only have the right shape."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d

    def fetch(self, rows: BatchIndices) -> Batch:
        """Refuse: the server has no samples of clients."""
        raise BadInputError("the samples are with the clients")

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return zero."""
        return y.sum() * 0

    def full_gradient(self, y: Tensor, data: Iterable[BatchIndices]) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(y)


def probe_template(method: Method, w: Tensor) -> State:
    """Return an answer to the method's probe: names, shapes and types count, values do not."""
    return method.probe(RemoteTask(w.numel()), w, [])


def upload_template(method: Method, w: Tensor, broadcast: State) -> State:
    """Return what one client uploads: names, shapes and types count, values do not."""
    probed = probe_template(method, w) if method.probes else {}
    ctx = ClientContext(w, broadcast, method.init_client(w) | probed, 1.0, torch.ones((), dtype=w.dtype))
    up, _ = method.finish(method.start(ctx), ctx)
    return up


def trial_cohort(m: int, population: int = 2, slot: State | None = None) -> Cohort:
    """Return a cohort to try a method on; the numbers of local steps are unknown."""
    return Cohort(
        round=1,
        clients=torch.arange(m),
        population=population,
        weights=torch.full((m,), 1 / m, dtype=torch.float64),
        steps=torch.full((m,), torch.nan, dtype=torch.float64),
        client_lr=1.0,
        server_lr=1.0,
        slots={k: v.expand(m, *v.shape).clone() for k, v in (slot or {}).items()},
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
