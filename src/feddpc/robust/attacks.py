"""What a faulty client sends instead of its update.

Every function takes the honest rows of the clients that misbehave alike, ``[k, n]``, and returns what they send. All
draws come from generators that are handed in, so that every engine sees the same faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from feddpc.methods._algebra import safe_ratio

#: What a "huge" client writes everywhere: finite, but its square is not, in float32.
HUGE = 1e30

Attack = Callable[[Tensor], Tensor]


def with_one(value: float) -> Attack:
    """One number of every row becomes ``value``: NaN and Inf are easy to see only if one looks everywhere.

    >>> with_one(math.inf)(torch.ones(1, 3))
    tensor([[1., 1., inf]])
    """

    def attack(x_kn: Tensor) -> Tensor:
        sent = x_kn.clone()
        sent[:, -1] = value
        return sent

    return attack


def times(factor: float) -> Attack:
    """Every row is multiplied by ``factor``: -1 flips signs, 0 is free riding."""
    return lambda x_kn: x_kn * factor


def huge(x_kn: Tensor) -> Tensor:
    """Every number becomes 1e30, with its own sign."""
    return torch.full_like(x_kn, HUGE).copysign(x_kn)


def noisy(spread: float, generators: Sequence[np.random.Generator]) -> Attack:
    """Add Gaussian noise that is, on average, ``spread`` times as long as the row."""

    def attack(x_kn: Tensor) -> Tensor:
        n = x_kn.shape[1]
        draws = torch.from_numpy(np.stack([rng.standard_normal(n) for rng in generators])).to(x_kn)
        return x_kn + spread / math.sqrt(n) * _lengths(x_kn) * draws

    return attack


def colluding(x_kn: Tensor) -> Tensor:
    """All send one vector: against the mean of their honest updates, as long as these are on average.

    >>> colluding(torch.tensor([[3.0, 4.0], [9.0, 12.0]]))
    tensor([[-6., -8.],
            [-6., -8.]])
    """
    return (-_unit(x_kn.mean(0)) * _lengths(x_kn).mean()).expand_as(x_kn)


def parallel(last_n: Tensor, tilt: float) -> Attack:
    """Hide where the model shall go in an update that looks like a repetition of the last global one.

    A row becomes ``c (sqrt(1 - tilt^2) g + tilt q)``, of the honest row's length ``c``: ``g`` is the unit vector of the
    last global update, ``q`` that of the direction against the mean of the attackers' honest updates, orthogonal to
    ``g``. FedDPC removes the part along ``g`` and scales the rest, of length ``tilt c``, back to the full length ``c``.
    """

    def attack(x_kn: Tensor) -> Tensor:
        g = _unit(last_n)
        mean = x_kn.mean(0)
        q = -_unit(mean - (mean @ g) * g)
        return _lengths(x_kn) * (math.sqrt(1 - tilt**2) * g + tilt * q)

    return attack


def _lengths(x_kn: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(x_kn, dim=1, keepdim=True)
    return sizes


def _unit(x_n: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x_n)
    return safe_ratio(x_n, length)
