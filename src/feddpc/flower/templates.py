"""What clients of a method send, found out at the server without a client: names, shapes and types."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import ClientContext, Cohort, Method, State
from feddpc.tasks.base import Batch, BatchIndices, Task


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
