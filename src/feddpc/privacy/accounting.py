"""The privacy budget: what rounds have spent, and how much noise a budget asks for. The package dp-accounting counts.

A round is a Gaussian mechanism on a Poisson sample of the clients, and rounds compose. Neighbouring federations differ
in one whole client, who is there or not. The accountant adds up the distribution of the privacy loss, rounded so that
the result is an upper bound, and a tight one. It depends on nothing but the arguments: a resumed run goes on with
exactly the same numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from feddpc.errors import BadInputError

#: Below this, epsilon is in the hundreds after a single round: nothing is promised, and nothing counted.
LEAST_NOISE = 0.05
#: A larger budget is not searched for.
MOST_EPSILON = 100.0


@lru_cache(maxsize=4096)
def epsilon(noise: float, sampling: float, rounds: int, delta: float) -> float:
    """Return what ``rounds`` rounds spend.

    Args:
        noise: standard deviation of the noise on the sum, in multiples of the clip.
        sampling: probability that a client takes part in a round.
        rounds: how many there were.
        delta: probability with which the promise may fail.

    >>> round(epsilon(noise=1.0, sampling=0.1, rounds=100, delta=1e-5), 2)
    7.05
    """
    if rounds == 0:
        return 0.0
    if noise < LEAST_NOISE:
        return math.inf
    loss = _one_round(noise, sampling).self_compose(rounds)
    with np.errstate(over="ignore"):  # it compares with a ratio that may be infinite
        return float(loss.get_epsilon_for_delta(delta))


def noise_for(target: float, sampling: float, rounds: int, delta: float) -> float:
    """Return the least noise with which ``rounds`` rounds spend at most ``target``, rounded up to five digits.

    >>> noise_for(8.0, sampling=0.1, rounds=100, delta=1e-5)
    0.93593
    """
    from scipy.optimize import brentq

    if not 0 < target <= MOST_EPSILON:
        raise BadInputError(
            f"privacy.epsilon = {target:g}: must be above 0 and at most {MOST_EPSILON:g}; for less noise, set "
            "privacy.noise instead"
        )

    def beyond(noise: float) -> float:
        return epsilon(noise, sampling, rounds, delta) - target

    enough = 1.0
    while beyond(enough) > 0:
        enough *= 2
    least = brentq(beyond, LEAST_NOISE, enough, rtol=1e-6)
    unit = 10.0 ** (math.floor(math.log10(least)) - 4)
    digits = math.ceil(least / unit)
    while beyond(float(f"{digits * unit:.5g}")) > 0:  # the search may end on the wrong side, by less than it was told
        digits += 1
    return float(f"{digits * unit:.5g}")


@lru_cache(maxsize=64)
def _one_round(noise: float, sampling: float) -> Any:
    """Return the distribution of one round's privacy loss, on a grid that is fine against its spread."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise BadInputError(
            "differential privacy counts its budget with the package dp-accounting: pip install 'dp-accounting>=0.6'"
        ) from None
    grid = min(1e-3 * max(1.0, (0.5 / noise) ** 2), sampling / noise / 20)
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=sampling, value_discretization_interval=grid, use_connect_dots=True
    )
