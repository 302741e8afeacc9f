"""The table in docs/scale.md of what ranks send per round, compared with what they do send."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddpc import methods
from feddpc.engines.distributed import Distributed, adds_up
from feddpc.engines.loop import Loop
from feddpc.methods.base import Method
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from ranks_in_threads import on_ranks
from support import VARIANTS, setting_for

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
#: Methods with a hyper-parameter that fits eight clients.
METHODS = {name: VARIANTS[name] for name in methods.names()} | {
    "feddpc, form = client": VARIANTS["feddpc client"],
    "feddpc, form = streaming": VARIANTS["feddpc streaming"],
    "feddpc, guard = exclude": VARIANTS["feddpc exclude"],
}


def vectors_sent(method: Method) -> tuple[int, int]:
    """Return how many vectors two ranks send in a round, beside a few numbers per client: of cohorts of 4 and of 8."""
    sent = []
    for cohort in (4, 8):
        each = [setting_for(method, cohort=cohort) for _ in range(2)]

        def work(ranks, each=each):
            experiment = each[ranks.rank]
            state = RunState.begin(method, experiment.w0, len(experiment.population))
            engine, counts = Distributed(Loop(), ranks), []
            for _ in range(4):
                before = ranks.sent
                run_round(experiment, method, engine, state)
                counts.append(ranks.sent - before)
            return max(counts[1:])

        sent.append(sum(on_ranks(2, work)) // each[0].task.d)
    return sent[0], sent[1]


def row(name: str, method: Method) -> str:
    """Return the row of the table for a method."""
    four, eight = vectors_sent(method)
    if adds_up(method):
        assert four == eight, f"{name}: traffic must not depend on the cohort"
        return f"| {name} | sums | {four // 2} d |"
    assert eight == 2 * four, f"{name}: traffic must grow with the cohort"
    return f"| {name} | all rows | {four // 4} d per client |"


@pytest.mark.parametrize("name", METHODS)
def test_the_page_says_what_ranks_send(name):
    assert row(name, METHODS[name]) in PAGE.read_text(encoding="utf-8")
