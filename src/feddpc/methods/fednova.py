"""FedNova: updates are divided by the number of local steps before they are averaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from feddpc.methods._algebra import safe_ratio
from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedNova(Method):
    """Average gradients per local step, so that clients with many steps do not pull the model to themselves.

    Client j, K_j steps from w_{t-1}:      y <- y - eta_l grad F_j(y; batch)
    Client j sends                         u_j = w_{t-1} - y = eta_l D_j
    Server                                 tau = sum_S p_j a_j
                                           w_t = w_{t-1} - eta_g tau sum_S p_j D_j / a_j

    p_j are the weights of the mean, and a_j = K_j. With momentum rho at the clients, a_j = (K_j - rho (1 - rho^K_j) /
    (1 - rho)) / (1 - rho), the sum of the factors with which gradients enter D_j. rho is that of ``client_optimizer``,
    so there is no hyper-parameter. Where all clients make the same number of steps this is FedAvg.

    Departures: the mean is uniform unless the experiment weights by samples (the paper: n_j / n); a client without a
    step counts in tau as 0. Nesterov's momentum and Adam at the clients are refused, as the paper has no a_j for them;
    weight decay is part of the objective, and clipping changes gradients but not how they add up.

    Confidence: the paper's equations; the closed form with momentum is a test.

    >>> from feddpc import methods
    >>> methods.create("fednova").hyper()
    {}
    """

    name: ClassVar[str] = "fednova"
    title: ClassVar[str] = "FedNova"
    reference: ClassVar[str] = "Wang et al., Tackling the Objective Inconsistency, NeurIPS 2020, arXiv:2007.07481"
    costs: ClassVar[Costs] = Costs(server_work="d per client")
    needs_only_sums: ClassVar[bool] = True

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """How often a gradient counts in an update must be known."""
        return "nesterov", "adam"

    def transform(self, server: State, up: State, cohort: Cohort) -> tuple[Transformed, State]:
        """The update per effective step."""
        return {"delta": safe_ratio(up["delta"], _effective_steps(cohort).to(up["delta"].dtype)[:, None])}, {}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """FedAvg of these, as long as if all clients had made the mean number of steps."""
        step = super().combine(w, server, rows, cohort)
        tau = (cohort.whole.weights * _effective_steps(cohort.whole)).sum()
        return replace(step, rate=step.rate * tau)


def _effective_steps(cohort: Cohort) -> Tensor:
    """Return a_j, ``[m]``: how often gradients count in an update."""
    K, rho = cohort.steps, cohort.momentum
    return K if not rho else (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
