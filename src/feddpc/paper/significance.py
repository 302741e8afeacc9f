"""How certain a difference over seeds is: t intervals, paired t tests, and Holm's correction for several tests."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Accepted probability of a false alarm, over all comparisons of a family.
LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its uncertainty, which one seed does not have."""

    mean: float
    count: int = 1
    spread: float | None = None  #: sample standard deviation
    low: float | None = None  #: lower end of the 95 % t interval
    high: float | None = None
    p: float | None = None  #: of the two-sided t test that the mean is zero

    def within(self, least: float, most: float) -> Estimate:
        """Return the estimate with its interval cut to what is possible.

        >>> estimate([0.9, 1.0, 0.95]).within(0.0, 1.0).high
        1.0
        """
        if self.low is None or self.high is None:
            return self
        return dataclasses.replace(self, low=max(self.low, least), high=min(self.high, most))


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, spread, interval and test of at least one value.

    Equal values have no spread: p is 0, or 1 if all are 0.

    >>> e = estimate([0.5, 0.6, 0.7])
    >>> round(e.mean, 6), round(e.spread, 6), round(e.high - e.mean, 6)
    (0.6, 0.1, 0.248414)
    """
    mean, n = math.fsum(values) / len(values), len(values)
    if n == 1:
        return Estimate(mean)
    if max(abs(v - mean) for v in values) <= 1e-14 * abs(mean):
        return Estimate(mean, n, 0.0, mean, mean, 0.0 if mean else 1.0)
    from scipy.stats import ttest_1samp

    test = ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(1 - LEVEL)
    return Estimate(mean, n, statistics.stdev(values), float(low), float(high), float(test.pvalue))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate | None:
    """Return the difference of ``a`` and ``b`` over the seeds that both have; None if they share none."""
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    return estimate(differences) if differences else None


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
