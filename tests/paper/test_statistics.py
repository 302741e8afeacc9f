"""Intervals and tests against SciPy and against what can be counted by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddpc.paper.significance import estimate, holm, paired

NUMBERS = st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 6))


@given(st.lists(NUMBERS, min_size=2, max_size=12).filter(lambda v: np.std(v) > 1e-4))
def test_intervals_and_t_tests_are_scipys(values):
    about = estimate(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (about.mean, about.spread) == pytest.approx((np.mean(values), np.std(values, ddof=1)), abs=1e-12)
    assert (about.low, about.high) == pytest.approx((low, high), abs=1e-9)
    assert about.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm(p):
    corrected = holm(p)
    assert all(a <= b <= min(1.0, len(p) * a) + 1e-12 for a, b in zip(p, corrected, strict=True))
    assert min(corrected) == pytest.approx(min(1.0, len(p) * min(p)))  # the smallest as by Bonferroni
    order = np.argsort(p, kind="stable")
    assert sorted(corrected) == [corrected[i] for i in order]


def test_comparisons_are_paired_by_seed():
    a, b = {0: 0.5, 1: 0.9, 7: 0.1}, {1: 0.8, 0: 0.3, 5: 0.0}
    result = paired(a, b)
    assert (result.mean, result.count) == (pytest.approx(0.15), 2)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_tells_nothing_about_spread():
    alone = paired({0: 0.5}, {0: 0.4})
    assert (alone.p, alone.spread, alone.low) == (None, None, None)
    assert alone.mean == pytest.approx(0.1)


def test_differences_without_spread():
    assert estimate([0.25, 0.25, 0.25]).p == 0.0
    assert estimate([0.0, 0.0]).p == 1.0
    assert estimate([0.1 + 0.2, 0.3, 0.3]).p == 0.0  # equal but for rounding
    assert math.isfinite(estimate([0.1, 0.1]).high)
