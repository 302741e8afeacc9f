"""How sure a difference over seeds is: intervals, two paired tests, and a correction for asking several times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from feddpc.errors import BadInputError
from feddpc.rng import generator

#: The chance of a false alarm that is accepted, over all comparisons asked together.
LEVEL = 0.05
#: Up to so many seeds all sign flips are tried; beyond, 2**EXACT random ones.
EXACT = 16


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; ``spread`` is the sample standard deviation, ``low`` to ``high`` the 95 % t interval.

    Both are None for one seed.
    """

    mean: float
    spread: float | None
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Paired:
    """Differences between two methods, seed by seed; ``t`` and ``flip`` are two-sided p-values, None for one seed."""

    differences: dict[int, float]
    about: Estimate
    t: float | None
    flip: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, spread and interval.

    >>> e = estimate([0.5, 0.6, 0.7])
    >>> round(e.mean, 6), round(e.spread, 6), round(e.high - e.mean, 6)
    (0.6, 0.1, 0.248414)
    """
    if not values:
        raise BadInputError("an estimate needs at least one value")
    mean, n = math.fsum(values) / len(values), len(values)
    if n == 1:
        return Estimate(mean, None, None, None, 1)
    from scipy.special import stdtrit

    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stdtrit(n - 1, 1 - LEVEL / 2)) * spread / math.sqrt(n)
    return Estimate(mean, spread, mean - half, mean + half, n)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare ``a`` with ``b`` over the seeds that both have; None if there is none."""
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return None
    differences = {seed: a[seed] - b[seed] for seed in seeds}
    values = list(differences.values())
    few = len(values) < 2
    return Paired(
        differences, estimate(values), None if few else t_test(values), None if few else sign_flip_test(values)
    )


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t test.

    Equal differences have no spread: p is 0, or 1 if all are 0.
    """
    about = estimate(differences)
    if about.spread is None:
        raise BadInputError("a t test needs at least two seeds")
    error = about.spread / math.sqrt(about.count)
    if error <= 1e-15 * abs(about.mean) or error == 0:
        return 0.0 if about.mean else 1.0
    from scipy.special import stdtr

    return float(2 * stdtr(about.count - 1, -abs(about.mean) / error))


def sign_flip_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of the sign-flip permutation test on the mean: the share of flips at least as far out.

    If the two methods were alike, each difference could as well have the other sign.

    >>> sign_flip_test([1.0, 2.0, 3.0])
    0.25
    """
    d = np.asarray(differences, np.float64)
    n = len(d)
    if n <= EXACT:
        flips = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        flips = generator(0, "sign-flips").choice([-1, 1], size=(2**EXACT, n))
        flips[0] = 1
    observed = abs(d.sum())
    # Sums in another order differ by rounding only, and must count as equal.
    return float((np.abs(flips @ d) >= observed - 1e-12 * np.abs(d).sum()).mean())


def smallest_flip(seeds: int) -> float:
    """Return the smallest two-sided p of the sign-flip test: 0.25 for three seeds, 0.0625 for five.

    >>> smallest_flip(3), smallest_flip(5)
    (0.25, 0.0625)
    """
    return min(1.0, 2.0 ** (1 - min(seeds, EXACT)))


def seeds_for(comparisons: int) -> int:
    """Return how many seeds the sign-flip test needs to reach `LEVEL` after Holm's correction for ``comparisons``.

    >>> seeds_for(1), seeds_for(7)
    (6, 9)
    """
    return next(n for n in range(1, EXACT + 1) if smallest_flip(n) * comparisons <= LEVEL)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down procedure, in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected


def corrected(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values after Holm's correction for those that there are; None where one seed allowed no test.

    >>> corrected([0.01, None, 0.03])
    [0.02, None, 0.03]
    """
    tested = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(tested) for p in p_values]
