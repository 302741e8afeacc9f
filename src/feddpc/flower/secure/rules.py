"""Which methods can do with the sum of what clients send."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from feddpc import methods
from feddpc.errors import BadInputError
from feddpc.methods.base import DATA_HOOKS, ClientContext, Cohort, Method, State, overrides
from feddpc.methods.feddpc import FedDPC

#: What calls for more exchanges than one, or for the server's knowledge of single clients.
MORE_THAN_A_SUM = ("init_slot", "init_client", "probes", "surveys", "probe_mask", "train_mask", *DATA_HOOKS)


def summable(method: Method | str, **hyper: Any) -> Method:
    """Return a method in the form whose server needs nothing but a sum, or refuse it.

    >>> summable("feddpc", lam=0.5).hyper()["form"]
    'client'
    >>> summable("fedexp")
    Traceback (most recent call last):
    feddpc.errors.BadInputError: fedexp needs more than a sum of what clients send: use feddpc, fedavg or fedprox
    """
    method = methods.create(method, **hyper) if isinstance(method, str) else method
    if isinstance(method, FedDPC):
        method = dataclasses.replace(method, form="client")
    if any(overrides(method, hook) for hook in MORE_THAN_A_SUM) or not sees_only_sums(method):
        raise BadInputError(f"{method.name} needs more than a sum of what clients send: use feddpc, fedavg or fedprox")
    return method


def sees_only_sums(method: Method) -> bool:
    """Try out whether the server rule notices that every client's row is replaced by the mean."""
    w = torch.arange(1.0, 6.0, dtype=torch.float64)
    server = {k: v + 0.5 for k, v in method.init_server(w, 3).items()}
    cohort = _three()
    down = method.broadcast(w, server, {}, cohort)
    # Long updates at right angles: as far from their mean as updates can be.
    ups = [
        method.finish(w - u, ClientContext(w, down, {}, 1.0, torch.ones(())))[0] for u in 10 * torch.eye(3, 5).double()
    ]
    rows = {k: torch.stack([up[k] for up in ups]) for k in ups[0]}
    means = repeated({k: v.mean(0) for k, v in rows.items()}, 3)
    real, seen = method.aggregate(w, server, rows, cohort), method.aggregate(w, server, means, cohort)
    pairs = [(real.rate * real.update, seen.rate * seen.update), *((v, seen.server[k]) for k, v in real.server.items())]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


def repeated(mean: State, m: int) -> State:
    """Return a stack whose ``m`` rows are all the mean: whoever sees only sums cannot tell it from the real one."""
    return {name: value.expand(m, *value.shape) for name, value in mean.items()}


def _three() -> Cohort:
    """Return a cohort to try a method on; how many steps its clients made is not known."""
    return Cohort(
        round=1,
        clients=torch.arange(3),
        population=3,
        weights=torch.full((3,), 1 / 3, dtype=torch.float64),
        steps=torch.full((3,), torch.nan, dtype=torch.float64),
        client_lr=1.0,
        server_lr=1.0,
    )
