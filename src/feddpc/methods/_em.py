"""Federated EM for Gaussian mixtures with diagonal covariances: clients send sums, the server adds them up.

Client j:  gamma_k(z) = weight_k N(z | mean_k, variance_k) / (the same, summed over the M components)
           n_k = sum gamma_k(z),  s_k = sum gamma_k(z) z,  q_k = sum gamma_k(z) z^2          over its own samples z
Server:    weight_k = n_k / sum n,  mean_k = s_k / n_k,  variance_k = max(q_k / n_k - mean_k^2, floor)  of sums over j

So the mixture is that of EM on the pooled data, for any partition, and the likelihood of the data never falls.
Samples z lie in the unit cube, into which a :class:`Box` maps them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[Any]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
BLOCK = 1 << 17  #: how many numbers of the data are turned into float64 at a time; few enough for a cache
NOBODY = 1e-9  #: a component that less than this of all samples belongs to is empty


@dataclass(frozen=True, eq=False)
class Box:
    """What bounds every feature of the data, ``[dim]``; a feature that never varies has no width.

    >>> box = Box.around([np.array([[0.0, 7.0]]), np.array([[4.0, 7.0]])])
    >>> box.inwards(np.array([1.0, 7.0])), box.outwards(np.array([1.25, 9.0]))
    (array([0.25, 0.  ]), array([4., 7.]))
    """

    low: Floats
    high: Floats

    @classmethod
    def around(cls, clients: Iterable[Samples]) -> Box:
        """Return the smallest box for the samples of all clients, from the smallest one of each."""
        lows, highs = zip(*((x.min(0), x.max(0)) for x in clients if len(x)), strict=True)
        return cls(np.min(lows, axis=0).astype(np.float64), np.max(highs, axis=0).astype(np.float64))

    def inwards(self, x: Samples) -> Floats:
        """Map samples into the unit cube."""
        return np.asarray((x - self.low) / np.where(self.high > self.low, self.high - self.low, 1.0))

    def outwards(self, z: Floats) -> Floats:
        """Map points back, those outside the cube to its surface."""
        return np.clip(self.low + z * (self.high - self.low), self.low, self.high)


@dataclass(frozen=True, eq=False)
class Mixture:
    """M Gaussians with diagonal covariances; ``counts`` says how many samples belong to each."""

    counts: Floats  #: ``[M]``
    means: Floats  #: ``[M, dim]``
    variances: Floats  #: ``[M, dim]``

    @property
    def weights(self) -> Floats:
        """The shares of the components, ``[M]``; all zero where no sample belongs to any."""
        return self.counts / (self.counts.sum() or 1.0)

    def without(self, below: float) -> Mixture:
        """Return the mixture without the components to which fewer samples belong; zeros stand in their place."""
        kept = self.counts >= max(below, NOBODY)
        return Mixture(self.counts * kept, self.means * kept[:, None], self.variances * kept[:, None])

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """Return ``n`` random samples, ``[n, dim]``."""
        k = rng.choice(len(self.counts), size=n, p=self.weights)
        return self.means[k] + np.sqrt(self.variances)[k] * rng.standard_normal((n, self.means.shape[1]))


@dataclass(frozen=True, eq=False)
class Sums:
    """What leaves a client in a round of EM: for each component the sums of gamma, gamma z and gamma z^2."""

    n: Floats
    s: Floats
    q: Floats

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.n + other.n, self.s + other.s, self.q + other.q)


def log_joint(mixture: Mixture, z: Floats, zz: Floats) -> Floats:
    """Return log(weight_k N(z | k)) for samples z, with squares zz, ``[n, M]``."""
    with np.errstate(divide="ignore"):  # log 0 = -inf: a component without samples
        log_weights = np.log(mixture.weights)
    precision = 1 / mixture.variances
    scaled = mixture.means * precision
    distance = zz @ precision.T - 2 * (z @ scaled.T) + (mixture.means * scaled).sum(1)
    return np.asarray(log_weights - 0.5 * (distance + np.log(2 * np.pi * mixture.variances).sum(1)))


def client_sums(mixture: Mixture, x: Samples, box: Box) -> Sums:
    """One client's E-step: what it answers to the mixture."""
    sums = Sums(np.zeros_like(mixture.counts), np.zeros_like(mixture.means), np.zeros_like(mixture.means))
    for block in np.array_split(x, max(1, x.size // BLOCK)):
        z = box.inwards(block)
        log_p = log_joint(mixture, z, zz := z * z)
        gamma = np.exp(log_p - log_p.max(1, keepdims=True))  # log-sum-exp: nothing overflows
        gamma /= gamma.sum(1, keepdims=True)
        sums += Sums(gamma.sum(0), gamma.T @ z, gamma.T @ zz)
    return sums


def maximise(total: Sums, old: Mixture, floor: float) -> Mixture:
    """The server's M-step, from the sums over all clients. An empty component stays where it is."""
    populated = (total.n > NOBODY)[:, None]
    n = np.where(populated, total.n[:, None], 1.0)
    means = np.where(populated, total.s / n, old.means)
    variances = np.where(populated, np.maximum(total.q / n - means**2, floor), old.variances)
    return Mixture(total.n, means, variances)


def improve(mixture: Mixture, clients: Sequence[Samples], box: Box, floor: float) -> Mixture:
    """One round of federated EM."""
    return maximise(functools.reduce(Sums.__add__, (client_sums(mixture, x, box) for x in clients)), mixture, floor)


def one_component(dim: int) -> Mixture:
    """Return a mixture whose E-step sums up all samples, since each belongs to its only component."""
    return Mixture(np.ones(1), *np.ones((2, 1, dim)))


def spread(whole: Mixture, M: int, floor: float, rng: np.random.Generator) -> Mixture:
    """Return the mixture before the first round, from the sums over all samples: no sample leaves its client.

    Each mean is that of all samples, moved in a random direction by about their deviation. All are moved equally far in
    the metric of the E-step, or in high dimension the one moved least would get most samples.
    """
    variance = np.maximum(whole.variances, floor)
    offsets = rng.standard_normal((M, whole.means.shape[1])) * np.sqrt(whole.variances)
    lengths = np.sqrt((offsets**2 / variance).sum(1, keepdims=True))
    offsets *= np.sqrt((whole.variances / variance).sum()) / np.where(lengths > 0, lengths, 1.0)
    return Mixture(np.full(M, whole.counts[0] / M), whole.means + offsets, np.repeat(variance, M, axis=0))


def start(clients: Sequence[Samples], box: Box, M: int, floor: float, rng: np.random.Generator) -> Mixture:
    """Return the mixture before the first round."""
    return spread(improve(one_component(len(box.low)), clients, box, 0.0), M, floor, rng)


def fit(x: Samples, owner: Ids, box: Box, M: int, rounds: int, floor: float, rng: np.random.Generator) -> Mixture:
    """Fit a mixture to samples, of which client ``owner[i]`` holds the i-th (in rising order); to none, zeros."""
    if not len(x):
        return Mixture(np.zeros(M), *np.zeros((2, M, len(box.low))))
    clients = np.split(x, np.flatnonzero(np.diff(owner)) + 1)
    mixture = start(clients, box, M, floor, rng)
    for _ in range(rounds):
        mixture = improve(mixture, clients, box, floor)
    return mixture
