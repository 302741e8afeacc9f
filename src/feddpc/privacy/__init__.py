"""Differential privacy at client level: bounded vectors, Gaussian noise on their sum, and the budget it costs."""

from feddpc.privacy.accounting import epsilon, noise_for
from feddpc.privacy.mechanism import ClippedSum, Mechanism

__all__ = ["ClippedSum", "Mechanism", "epsilon", "noise_for"]
