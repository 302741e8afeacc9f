"""What a ladder of a sweep chooses, what it costs, and what it leaves alone."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from feddpc.errors import BadInputError
from feddpc.study import InProcess, RunSpec, StudyPlan, run_study, run_sweep
from feddpc.study.folder import StudyFolder
from feddpc.study.ladder import _at_chance, next_to
from feddpc.study.overrides import Overrides
from feddpc.study.space import Space
from feddpc.study.sweep import choose_both, climb_plan, scan
from sweeping import SMALL, Made, config, ladder_plan


def spec(rounds):
    return RunSpec(config(rounds=rounds, method="feddpc", lr=0.1), extendable=True)


def test_problems_do_not_compete_and_none_is_invented():
    """Alpha 10 is easier for every setting; each alpha still has its own finalists, and no other alpha is run."""
    overrides = Overrides()
    overrides.absorb({**SMALL, "rounds": 400}, ["fedavg"])
    space = Space.grid({"lr": [0.3, 0.1, 0.03, 0.01], "alpha": [0.1, 10.0]})
    plan = StudyPlan(["fedavg"], [0], overrides, space, ladder=True)

    class Easier(Made):
        def result(self, spec):
            self.score = lambda *_: 0.4 + 0.05 * spec.config.alpha - abs(np.log10(spec.config.lr / 0.1)) / 10
            return super().result(spec)

    state = climb_plan(plan, Easier(None))
    assert {trial.config.alpha for trial in state.trials} == {0.1, 10.0}
    choices = [c for c in choose_both(state.results, plan) if c.by == "validation"]
    assert [(c.problem["alpha"], c.settings["lr"]) for c in choices] == [(0.1, 0.1), (10.0, 0.1)]
    assert choices[0].count == choices[1].count


def test_a_neighbor_that_was_stopped_keeps_its_checkpoint(tmp_path):
    """It had fallen off at round 2 and was continued to round 5: nobody drops it for having fallen off."""
    run_study([spec(5)], tmp_path)
    checkpoint = tmp_path / "items" / spec(2).key / "checkpoint"
    StudyFolder(tmp_path).drop_checkpoint(spec(2))
    assert checkpoint.exists()
    StudyFolder(tmp_path).drop_checkpoint(spec(5))
    assert not checkpoint.exists()


def test_an_unfinished_ladder_chooses_nothing():
    plan = ladder_plan()
    for at in (1, 2, 4, 8):

        def stopped(c, at=at):
            return "missing" if (c.method, c.rounds, c.lr) == ("fedavg", at, 0.03) else "done"

        choices = choose_both(climb_plan(plan, Made(lambda lr, *_: 0.9 - lr / 10, stopped)).results, plan)
        assert [(c.method, c.settings) for c in choices] == [(m, None) for m in ("fedavg", "feddpc")] * 2
        assert [c.missing for c in choices if c.method == "fedavg"] == [1, 1]


def test_a_method_that_diverged_at_once_stays_in_the_table():
    def status(c):
        return "diverged" if c.method == "fedavg" else {0.3: "diverged", 0.03: "failed"}.get(c.lr, "done")

    plan = ladder_plan()
    choices = {c.method: c for c in choose_both(climb_plan(plan, Made(lambda *_: 0.9, status)).results, plan)}
    assert (choices["fedavg"].settings, choices["fedavg"].diverged, choices["fedavg"].finalists) == (None, 6, 0)
    assert choices["feddpc"].settings["lr"] not in (0.3, 0.03)
    assert "2 diverged" in choices["feddpc"].notes
    assert "2 failed" in choices["feddpc"].notes


def test_the_budget_of_a_ladder_is_the_sum_of_its_rounds():
    plan = ladder_plan()
    results = climb_plan(plan, Made(lambda lr, *_: 0.9 - lr / 10)).results
    for choice in choose_both(results, plan):
        mine = [r for r in results if r.spec.config.method == choice.method]
        assert choice.spent == sum(r.rounds for r in mine) < choice.count * 2 * 8
        ended = {r.spec.label.partition(" seed ")[0] for r in mine if r.spec.config.rounds == 8}
        assert choice.budget == f"{choice.count}/{len(ended)}/{choice.spent}"


def test_whole_numbers_beyond_the_grid_are_tried_as_whole_numbers():
    overrides = Overrides()
    overrides.absorb({**SMALL, "rounds": 8}, ["fedavg"])
    plan = StudyPlan(["fedavg"], [0], overrides, Space.grid({"batch_size": [16, 32]}), ladder=True)

    class Larger(Made):
        def result(self, spec):
            self.score = lambda *_: spec.config.batch_size / 1000
            return super().result(spec)

    sizes = [trial.config.batch_size for trial in climb_plan(plan, Larger(None)).around]
    assert sizes[:2] == [64, 128]
    assert all(type(size) is int for size in sizes)
    assert next_to([1, 2], 1, fill=False) == [[2], [0.5, 0]]
    assert next_to([1.0, 2], 2, fill=False) == [[1.0], [4.0]]


def test_the_rounds_of_a_ladder_cannot_be_varied():
    with pytest.raises(BadInputError, match="rounds"):
        dataclasses.replace(ladder_plan(), space=Space.grid({"lr": [0.1], "rounds": [20, 40]}))


@pytest.mark.parametrize(("classes", "bar"), [(2, 0.5 + 0.5 / 18), (10, 0.15), (200, 0.0075)])
def test_at_chance(classes, bar, monkeypatch):
    about = SimpleNamespace(classes=classes, target="classes")
    monkeypatch.setattr("feddpc.study.ladder.dataset", lambda _: about)
    result = Made(lambda *_: 0.5).result(spec(1))
    assert _at_chance([result], bar - 1e-6)
    assert not _at_chance([result], bar + 1e-6)


def test_a_ladder_without_its_plan_is_shown(tmp_path):
    results = run_sweep(ladder_plan(), tmp_path, workers=InProcess())
    (tmp_path / "sweep.toml").unlink()
    assert {r.status for r in scan([tmp_path])} == {"done"}
    assert {r.key for r in scan([tmp_path])} == {r.key for r in results}
