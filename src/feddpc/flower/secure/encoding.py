"""Fixed-point numbers: what a client hands to the masks, and what the mean over the cohort says.

Masks are uniform integers, so numbers become integers first. Every array is divided by a public bound, which brings it
into [-1, 1], and is rounded, up or down at random and right on average, to one of ``levels + 1`` points in there. No
number is ever clipped: a client whose update is beyond the bound does not send it (``client.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from feddpc.checks import check_int, check_positive
from feddpc.methods.base import State

#: Masked numbers are counted modulo this, the most that Flower allows.
MODULUS = 1 << 32
#: Flower rounds to 32-bit integers with a sign.
MOST_LEVELS = 1 << 30
#: The largest training loss that is told as it is; one above counts as this much.
LOSS_BOUND = 100.0

#: The record of a message that says how numbers are encoded.
SECURE = "secure"

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
