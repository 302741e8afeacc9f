"""What the paper reports, as data: arXiv:2512.20329. Line numbers are those of its LaTeX source, paper.tex.

The curves exist as pictures only, so their values are not here; the text's claims about them are in ``claims.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The rows of Table 2 (lines 274 to 282), in its order; FedAvg is not among them.
METHODS = ("fedprox", "fedexp", "fedga", "fedcm", "fedvarp", "feddpc")
ALPHAS = (0.2, 0.6)  #: line 211
LAMBDAS = (3.0, 2.0, 1.0, 0.1, 0.0, -0.1, -0.5)  #: line 321
LAMBDA = 1.0  #: of every other result, line 259
RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)  #: the grid of the learning rate, line 259
#: The hyper-parameter that was tuned besides the rate, line 259; its grid is the same for all four.
TUNED = {"fedprox": "mu", "fedexp": "eps", "fedga": "beta", "fedcm": "alpha"}
VALUES = (1.0, 0.1, 0.01, 0.001)
ABLATION_RATE = 0.1  #: "the best-performing learning rate" of figures 4 and 5, CIFAR-10, lines 307 and 321

#: Figures by the labels of the source, fig:1 to fig:5; two drawings come before them, so print has 3 to 7.
FIGURES = {"figure1": "cifar10", "figure2": "cifar100", "figure3": "tiny-imagenet"}
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny ImageNet", "digits": "digits"}


@dataclass(frozen=True)
class Reported:
    """A cell of Table 2: best test accuracy in percent, and the round of it."""

    accuracy: float
    round: int


def _column(*cells: tuple[float, int]) -> dict[str, Reported]:
    return {method: Reported(*cell) for method, cell in zip(METHODS, cells, strict=True)}


#: Table 2, lines 274 to 282, by data set and alpha.
TABLE2: dict[tuple[str, float], dict[str, Reported]] = {
    ("cifar10", 0.2): _column((45.20, 317), (49.47, 363), (48.72, 395), (52.12, 369), (49.15, 398), (55.44, 372)),
    ("cifar10", 0.6): _column((48.79, 378), (51.61, 399), (51.97, 399), (56.06, 378), (51.16, 398), (57.96, 364)),
    ("cifar100", 0.2): _column((29.03, 794), (30.35, 796), (28.87, 797), (32.09, 800), (30.36, 790), (36.21, 776)),
    ("cifar100", 0.6): _column((29.90, 790), (31.07, 761), (29.77, 790), (36.22, 775), (32.93, 784), (39.87, 767)),
    ("tiny-imagenet", 0.2): _column((20.07, 794), (22.59, 781), (21.54, 781), (22.00, 798), (22.69, 766), (23.83, 767)),
    ("tiny-imagenet", 0.6): _column((22.43, 786), (25.80, 779), (24.60, 797), (25.21, 785), (25.96, 797), (30.22, 798)),
}

#: Seconds per round on a Tesla V100, same lines; one column for both alphas.
SECONDS: dict[str, dict[str, float]] = {
    data: dict(zip(METHODS, column, strict=True))
    for data, column in {
        "cifar10": (0.50, 0.45, 0.50, 0.49, 0.52, 0.51),
        "cifar100": (1.05, 0.92, 1.01, 0.99, 0.88, 0.99),
        "tiny-imagenet": (1.80, 1.59, 1.70, 1.72, 1.73, 1.65),
    }.items()
}


@dataclass(frozen=True)
class Formula:
    """A row of Table 1 (lines 147 to 159): operations, with d parameters, m batches of n samples, k' participants.

    Local: ``fixed d + m n d + per_step m d``. Server: ``per_client k' d + server_fixed d``. ``state`` is the column
    "maintain previous state".
    """

    fixed: int
    per_step: int
    per_client: int
    server_fixed: int
    state: Literal["-", "d", "k'd"] = "-"

    def vectors(self, m: float) -> float:
        """Return the local operations without gradients, in d, for ``m`` steps."""
        return self.fixed + self.per_step * m

    def local(self, m: float, n: float) -> float:
        """Return the local operations in d."""
        return self.vectors(m) + m * n

    def server(self, k: float) -> float:
        """Return the server's operations in d, for ``k`` participants."""
        return self.per_client * k + self.server_fixed

    @property
    def local_text(self) -> str:
        """The formula as the paper prints it."""
        return f"{_times(self.fixed)}d + mnd + {_times(self.per_step)}md"

    @property
    def server_text(self) -> str:
        """The formula as the paper prints it."""
        return f"{_times(self.per_client)}k'd" + (f" + {_times(self.server_fixed)}d" if self.server_fixed else "")


def _times(factor: int) -> str:
    return "" if factor == 1 else str(factor)


TABLE1: dict[str, Formula] = {
    "fedavg": Formula(1, 1, 1, 0),
    "fedprox": Formula(1, 2, 1, 0),
    "fedexp": Formula(1, 1, 2, 2),
    "fedga": Formula(4, 1, 2, 0, "k'd"),
    "fedcm": Formula(2, 2, 1, 1),
    "fedvarp": Formula(2, 1, 2, 3, "d"),
    "feddpc": Formula(2, 1, 4, 1),
}
