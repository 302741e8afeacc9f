"""What a secure sum can carry: methods whose server needs only the sum of the uploads, and numbers as integers.

Masks are uniform integers, so numbers become integers first. Every array is divided by a public bound, which brings it
into [-1, 1], and is rounded, up or down at random and right on average, to one of ``levels + 1`` points. No number is
ever clipped: a client whose update exceeds the bound does not send it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from feddpc import methods
from feddpc.checks import check_int, check_positive
from feddpc.errors import BadInputError
from feddpc.flower.method_traits import trial_cohort
from feddpc.methods.base import DATA_HOOKS, ClientContext, Method, State, overrides
from feddpc.methods.feddpc import FedDPC

#: Masked numbers are counted modulo this, the most that Flower allows.
MODULUS = 1 << 32
#: Flower rounds to 32-bit integers with a sign.
MOST_LEVELS = 1 << 30
#: The largest training loss that is sent; a larger one counts as this.
LOSS_BOUND = 100.0

#: The record of a message that says how numbers are encoded.
SECURE = "secure"
#: Hooks that need more than one exchange, or a server that knows single clients.
MORE_THAN_A_SUM = ("init_slot", "init_client", "probes", "surveys", "probe_mask", "train_mask", *DATA_HOOKS)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Encoding:
    """Fixed-point numbers for the sum over up to ``clients`` updates, none longer than ``max_norm``.

    As many levels as possible are used such that the sum, at most ``clients * levels``, stays below the modulus:

        levels = 2^floor(log2((2^32 - 1) / clients))
        error  = 2 max_norm / levels          every coordinate of the mean update is off by less

    >>> four = Encoding(max_norm=10.0, clients=4)
    >>> four.levels == 2**29, four.error < 4e-8
    (True, True)
    """

    max_norm: float
    clients: int

    def __post_init__(self) -> None:
        check_positive("max_norm", self.max_norm)
        check_int("clients", self.clients, 1, MODULUS // 2)

    def record(self) -> ConfigRecord:
        """Return the encoding as it travels."""
        return ConfigRecord({"max-norm": self.max_norm, "clients": self.clients})

    @classmethod
    def read(cls, record: ConfigRecord) -> Encoding:
        """Return the encoding of a message."""
        return cls(record.get("max-norm"), record.get("clients"))  # type: ignore[arg-type]  # it checks them

    @property
    def levels(self) -> int:
        """Into how many steps the span of a number is divided."""
        return min(1 << ((MODULUS - 1) // self.clients).bit_length() - 1, MOST_LEVELS)

    @property
    def error(self) -> float:
        """No coordinate of the mean update is off by more."""
        return 2 * self.max_norm / self.levels

    def bound(self, name: str) -> float:
        """Return the bound of what is sent under ``name``; whatever is neither update nor loss is a flag."""
        return {"delta": self.max_norm, "loss": LOSS_BOUND}.get(name, 1.0)

    def encode(self, up: State) -> list[Floats]:
        """Return arrays in [-1, 1], in the order of ``up``; in float64, for float32 cannot tell all levels apart."""
        return [value.reshape(-1).double().numpy() / self.bound(name) for name, value in up.items()]

    def decode(self, means: list[Floats], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> State:
        """Return means as they were sent: with their names, shapes and type."""
        parts = zip(shapes.items(), means, strict=True)
        return {name: torch.from_numpy(m * self.bound(name)).reshape(shape).to(dtype) for (name, shape), m in parts}


def summable(method: Method | str, **hyper: Any) -> Method:
    """Return a method in the form whose server needs only a sum, or refuse it.

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
    """Return whether the server rule gives the same result if every client's row is replaced by the mean."""
    w = torch.arange(1.0, 6.0, dtype=torch.float64)
    server = {k: v + 0.5 for k, v in method.init_server(w, 3).items()}
    cohort = trial_cohort(3, 3)
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
    """Return a stack whose ``m`` rows all are the mean: a server rule that uses only sums gives the same result."""
    return {name: value.expand(m, *value.shape) for name, value in mean.items()}
