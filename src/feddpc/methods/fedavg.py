"""FedAvg with two-sided learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddpc.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Average the clients' updates and step along the mean.

    Client j, K_j steps from w_{t-1}:      y <- y - eta_l grad F_j(y; batch)
    Client j sends                         u_j = w_{t-1} - y = eta_l D_j
    Server                                 w_t = w_{t-1} - eta_g mean_S D_j

    With eta_g = eta_l (the default) this is plain model averaging. Every hook is the default of ``Method``, so this
    class is empty: the rule stands in ``base.py``.

    Departures: the mean is uniform, as in the FedDPC paper; ``weighting = "samples"`` gives the original's
    n_j / sum n_i over the participants.

    Confidence: paper and public code.

    >>> FedAvg().hyper()
    {}
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    reference: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    needs_only_sums: ClassVar[bool] = True
