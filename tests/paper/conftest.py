"""Studies whose outcome is known beforehand."""

import dataclasses

import pytest

from feddpc.paper.study import PaperStudy
from feddpc.paper.study_spec import DOUBLED
from made_up import PAPERS_ORDER, row, table2


@pytest.fixture
def study():
    """Everything, on digits, in the paper's order."""
    lams = {3.0: 0.40, 2.0: 0.66, 1.0: 0.70, 0.1: 0.52, 0.0: 0.50, -0.1: 0.49, -0.5: 0.40}
    wiggle = (-0.01, 0.0, 0.01)
    notes = {"mean_scale": 2.01, "mean_cosine": -0.1}
    figure4 = [
        row("figure4", "feddpc", [0.70 + w for w in wiggle], text="FedDPC", loss=0.5, **notes),
        row("figure4", "no scaling", [0.55 + 1.1 * w for w in wiggle], text="projection only", loss=0.8),
        row("figure4", "neither", [0.45 + 0.9 * w for w in wiggle], text="neither (FedAvg)", loss=1.1),
        row("figure4", DOUBLED, [0.69 + 3 * w for w in wiggle], text="FedAvg, step x2", loss=0.5),
    ]
    figure5 = [row("figure5", f"lambda {k:g}", [v + w * (1 + k / 50) for w in wiggle]) for k, v in lams.items()]
    figure5 += [row("figure5", f"step {1 + k:g}", [v - 0.02 + w for w in wiggle]) for k, v in lams.items()]
    rows = [*table2(**PAPERS_ORDER), *table2(alpha=0.6, **PAPERS_ORDER), *figure4, *figure5]
    origin = {"settings": "made up", "machine": {"torch": "2.0"}}
    return PaperStudy("digits", "tiny", "4 of the paper's 400 rounds", rows, origin)


@pytest.fixture
def whole(study):
    """The same, as if it were CIFAR-10 at the paper's scale."""
    return dataclasses.replace(study, data="cifar10", scale="paper", short="")
