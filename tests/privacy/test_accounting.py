"""The budget: closed forms, exact curves, monotony, and the search for the noise."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy.special import logsumexp
from scipy.stats import norm

from feddpc.errors import BadInputError
from feddpc.privacy import epsilon, noise_for

DELTA = 1e-5


def exact_gaussian(noise, delta):
    """The smallest epsilon of one Gaussian mechanism without sampling (Balle, Wang 2018, theorem 8)."""

    def gap(eps):
        a, b = 1 / (2 * noise), eps * noise
        return norm.cdf(a - b) - math.exp(eps + norm.logcdf(-a - b)) - delta

    return optimize.brentq(gap, 0, 200)


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 1), (1.0, 1), (5.0, 10), (20.0, 100), (4.0, 100)])
def test_everybody_in_every_round_is_one_gaussian(noise, rounds):
    """T rounds with noise z and no sampling are one Gaussian mechanism with noise z / sqrt(T)."""
    exact = exact_gaussian(noise / math.sqrt(rounds), DELTA)
    assert exact <= epsilon(noise, 1.0, rounds, DELTA) <= 1.001 * exact


@pytest.mark.parametrize("sampling", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_one_sampled_round_is_known_exactly(noise, sampling):
    """Sampling turns the (e, d) of a round into (log(1 + q(exp(e) - 1)), q d)."""
    exact = math.log1p(sampling * math.expm1(exact_gaussian(noise, DELTA / sampling)))
    assert exact <= epsilon(noise, sampling, 1, DELTA) <= 1.001 * exact


@pytest.mark.parametrize(("noise", "sampling", "rounds"), [(1.0, 0.1, 100), (2.0, 0.01, 1000), (1.5, 0.5, 10)])
def test_many_sampled_rounds_are_below_the_bound_of_renyi(noise, sampling, rounds):
    """At a whole order a the divergence is log(sum_k C(a,k) (1-q)^(a-k) q^k exp(k(k-1)/2z^2)) / (a-1)."""
    bounds = []
    for a in range(2, 65):
        k = np.arange(a + 1)
        binomial = [math.lgamma(a + 1) - math.lgamma(i + 1) - math.lgamma(a - i + 1) for i in k]
        terms = binomial + (a - k) * math.log1p(-sampling) + k * math.log(sampling) + k * (k - 1) / (2 * noise**2)
        divergence = rounds * logsumexp(terms) / (a - 1)
        # Canonne, Kamath, Steinke 2020, proposition 12
        bounds.append(divergence + math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1))
    assert 0.7 * min(bounds) < epsilon(noise, sampling, rounds, DELTA) < min(bounds)


@settings(max_examples=10, deadline=None)
@given(noise=st.floats(0.5, 10), sampling=st.floats(0.01, 1), rounds=st.integers(1, 300), delta=st.floats(1e-8, 1e-3))
def test_the_budget_grows_with_rounds_and_sampling_and_falls_with_noise_and_delta(noise, sampling, rounds, delta):
    spent = epsilon(noise, sampling, rounds, delta)
    slack = 1e-3 * spent + 1e-6  # of the grid
    assert spent <= epsilon(noise, sampling, rounds + 1, delta) + slack
    assert spent >= epsilon(noise, sampling, rounds, 2 * delta) - slack
    assert spent >= epsilon(noise, 0.8 * sampling, rounds, delta) - slack
    assert spent >= epsilon(1.2 * noise, sampling, rounds, delta) - slack


def test_nothing_is_spent_in_no_round_and_everything_without_noise():
    assert epsilon(1.0, 0.1, 0, DELTA) == 0
    assert epsilon(0.0, 0.1, 1, DELTA) == math.inf


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 100.0])
@pytest.mark.parametrize(("sampling", "rounds"), [(0.1, 100), (0.01, 1000), (1.0, 10)])
def test_the_noise_found_meets_the_target(target, sampling, rounds):
    noise = noise_for(target, sampling, rounds, DELTA)
    assert 0.99 * target <= epsilon(noise, sampling, rounds, DELTA) <= target
    assert float(f"{noise:.5g}") == noise


@pytest.mark.parametrize("target", [0.0, -1.0, 101.0, math.inf, math.nan])
def test_targets_that_promise_nothing_are_refused(target):
    with pytest.raises(BadInputError, match=r"privacy\.epsilon = .*at most 100"):
        noise_for(target, 0.1, 10, DELTA)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(BadInputError, match="pip install 'dp-accounting"):
        noise_for(8.0, 0.12345, 10, DELTA)  # not asked for elsewhere, so nothing is cached
