"""FedExP: a server step that grows when the clients' updates disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from feddpc.methods._algebra import row_squares, safe_ratio, square
from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed


@dataclass(frozen=True, kw_only=True)
class FedExP(Method):
    """Extrapolate the server step when updates disagree.

    In parameter units u_j = w_{t-1} - w_j:

    Client j:  plain local SGD, sends u_j
    Server:    ubar = mean_S u_j
               eta  = max( 1, sum_S |u_j|^2 / (2 m (|ubar|^2 + eps)) )
               w_t  = w_{t-1} - (eta_g / eta_l) eta ubar

    | symbol | name        | default | domain   |                                                     |
    |--------|-------------|---------|----------|-----------------------------------------------------|
    | eps    | eps         | 0.001   | eps >= 0 | in units of |u|^2, not of |D|^2                     |
    |        | eps_times_m | false   |          | the authors' code adds m eps where the paper has eps |
    |        | evaluate    | last    | last, pair | pair evaluates (w_t + w_{t-1}) / 2, as the authors do |

    One participant, or identical updates: eta = 1. m orthogonal updates of equal norm, eps = 0: eta = max(1, m/2).

    Departures: the paper has no further server rate; ours multiplies by eta_g / eta_l, which is 1 unless they are set
    apart. The evaluated model is w_t unless ``evaluate`` is pair. ``eps`` is constant: with ``lr_decay`` the authors'
    code multiplies it by the square of the decay per round, because |u|^2 shrinks with the rate.

    Confidence: paper (through summaries) and the authors' code.

    >>> FedExP().hyper()
    {'eps': 0.001, 'eps_times_m': False, 'evaluate': 'last'}
    """

    name: ClassVar[str] = "fedexp"
    title: ClassVar[str] = "FedExP"
    reference: ClassVar[str] = (
        "Jhunjhunwala et al., FedExP: Speeding Up FedAvg via Extrapolation, ICLR 2023, arXiv:2301.09604"
    )
    costs: ClassVar[Costs] = Costs(server_work="norms: 2d per client")
    needs_only_sums: ClassVar[bool] = True

    eps: float = 1e-3
    eps_times_m: bool = False
    evaluate: Literal["last", "pair"] = "last"

    def __post_init__(self) -> None:
        self.require(self.eps >= 0, "eps", "eps >= 0")

    def init_server(self, w: Tensor, population: int) -> State:
        """For pairs: the model before."""
        return {"previous": w.clone()} if self.evaluate == "pair" else {}

    def evaluated(self, w: Tensor, server: State) -> Tensor:
        """The iterates oscillate; their authors look at the mean of two."""
        return (w + server["previous"]) / 2 if self.evaluate == "pair" else w

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Extrapolate along the mean update."""
        u_md = rows["delta"]
        ubar = cohort.mean(u_md)
        eps = self.eps * len(cohort.whole.clients) if self.eps_times_m else self.eps
        squares = cohort.across(cohort.weights @ row_squares(u_md))
        eta = safe_ratio(squares, 2 * (square(ubar) + eps)).clamp(min=1.0)
        rate = cohort.server_lr / cohort.client_lr * eta
        previous = {"previous": w.clone()} if self.evaluate == "pair" else {}
        return Step(ubar, rate=rate, server=previous, notes={"extrapolation": eta})
