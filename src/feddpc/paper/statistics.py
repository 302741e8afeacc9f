"""How certain a difference over seeds is: t intervals, paired t tests, and Holm's correction for several tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feddpc.errors import BadInputError

#: Accepted probability of a false alarm, over all comparisons of a family.
LEVEL = 0.05


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
    """Differences between two methods, seed by seed; ``p`` is that of the two-sided t test, None for one seed."""

    differences: dict[int, float]
    about: Estimate
    p: float | None


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
    from scipy.stats import t

    spread = statistics.stdev(values, mean)
    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * spread / math.sqrt(n)
    return Estimate(mean, spread, mean - half, mean + half, n)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare ``a`` with ``b`` over the seeds that both have; None if there is none."""
    differences = {seed: a[seed] - b[seed] for seed in a if seed in b}
    if not differences:
        return None
    values = list(differences.values())
    return Paired(differences, estimate(values), t_test(values) if len(values) > 1 else None)


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t test.

    Equal differences have no spread: p is 0, or 1 if all are 0.
    """
    if len(differences) < 2:
        raise BadInputError("a t test needs at least two seeds")
    mean = math.fsum(differences) / len(differences)
    if max(abs(d - mean) for d in differences) <= 1e-14 * abs(mean):
        return 0.0 if mean else 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected by Holm's step-down procedure, in the given order; None stands for no test.

    >>> holm([0.01, None, 0.03])
    [0.02, None, 0.03]
    """
    tested = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = highest
    return corrected
