"""A study that grows: more seeds, methods and settings in the same folder, and a winner at the end of its grid."""

import json

import pytest

from feddpc.errors import BadInputError, RunFolderError
from feddpc.study import Space, StudyPlan, run_sweep, workers
from feddpc.study.compare import compare
from feddpc.study.overrides import Overrides
from feddpc.study.plan import extend_stored, refuse_another, stored_plan
from feddpc.study.sweep import choose_both
from sweeping import SMALL, outcome


def plan(rates=(0.3, 0.1), methods=("feddpc", "fedavg"), seeds=(0,), **more):
    overrides = Overrides({**SMALL, **more, "model_options": dict(SMALL["model_options"])})
    return StudyPlan(list(methods), list(seeds), overrides, Space.grid({"lr": list(rates)}))


def test_a_sweep_grows_and_runs_only_what_is_new(tmp_path, monkeypatch):
    run_sweep(plan(), tmp_path)
    seen = []
    plain = workers.execute

    def watched(setting, **how):
        seen.append((setting.config.method, setting.config.lr, setting.config.seed))
        return plain(setting, **how)

    monkeypatch.setattr(workers, "execute", watched)
    wider = plan(rates=(1.0,), methods=("fedprox",), seeds=(1,))
    with pytest.raises(RunFolderError, match="--extend"):
        run_sweep(wider, tmp_path)
    grown = extend_stored(tmp_path, wider)
    assert (grown.methods, grown.seeds) == (["feddpc", "fedavg", "fedprox"], [0, 1])
    assert grown.space.axes["lr"].values == (0.3, 0.1, 1.0)
    results = run_sweep(grown, tmp_path, extend=True)
    assert len(results) == 3 * 3 * 2
    assert len(seen) == 18 - 4
    asked = [(r.spec.config.method, r.spec.config.lr, r.spec.config.seed) for r in results]
    order = [(m, lr, s) for m in grown.methods for lr in (0.3, 0.1, 1.0) for s in (0, 1)]
    assert asked == order  # methods as given, then the order of the grid
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(r["method"], r["settings"]["lr"], r["seed"]) for r in rows] == order
    assert stored_plan(tmp_path, "sweep").seeds == [0, 1]


def test_what_cannot_be_added_is_refused(tmp_path):
    run_sweep(plan(rates=(0.1,), methods=("fedavg",)), tmp_path)
    with pytest.raises(RunFolderError, match="rounds = 5, was 4"):
        refuse_another(tmp_path, extend_stored(tmp_path, plan(rounds=5)), extend=True)
    other = StudyPlan(["fedavg"], [0], plan().overrides, Space.grid({"epochs": [1, 2]}))
    with pytest.raises(BadInputError, match="values of lr"):
        extend_stored(tmp_path, other)
    with pytest.raises(RunFolderError, match="no sweep to extend"):
        extend_stored(tmp_path / "absent", plan())


def test_more_draws_keep_the_first_ones():
    few, many = (Space.random({"lr": "log:1e-3:1"}, n, seed=1) for n in (3, 5))
    grown = few.extended(many)
    assert grown.trials == 5
    assert grown.search(["lr"]).ask()[:3] == few.search(["lr"]).ask()


@pytest.mark.parametrize(("best", "ends"), [(0.3, ["lr"]), (0.1, []), (0.03, ["lr"])])
def test_a_winner_at_the_end_of_the_grid_is_named(best, ends):
    rates = (0.1, 0.3, 0.03)
    results = [outcome(lr=lr, valid=0.9 if lr == best else 0.5, test=0.9 if lr == best else 0.5) for lr in rates]
    choices = choose_both(results, plan(rates=rates))
    assert [choice.grid_ends for choice in choices] == [ends, ends]
    assert all(choice.as_dict()["grid_ends"] == ends for choice in choices)
    assert all(bool(choice.notes) == bool(ends) for choice in choices)
    draws = StudyPlan(["fedavg"], [0], plan().overrides, Space.random({"lr": "log:1e-3:1"}, 3))
    assert [choice.grid_ends for choice in choose_both(results, draws)] == [[], []]


def test_a_hyper_parameter_at_the_end_of_its_grid():
    results = [outcome("feddpc", hyper={"lam": lam}, valid=lam, test=lam) for lam in (0.1, 0.5, 0.9)]
    for key in ("lam", "hyper.lam", "feddpc.lam"):
        grid = StudyPlan(["feddpc"], [0], Overrides({"validation": 0.1}), Space.grid({key: [0.1, 0.5, 0.9]}))
        assert choose_both(results, grid)[0].grid_ends == ["lam"]


def test_a_comparison_is_not_extended_by_a_method_that_would_leave_others_less_data(tmp_path):
    """Data sharing needs samples at the server; all methods of a comparison have the same data."""
    overrides = Overrides({"clients": 10, "cohort": 2, "rounds": 1, "engine": "loop", "device": "cpu", "threads": 1})
    compare(overrides, ["fedavg"], [0], tmp_path)
    with pytest.raises(RunFolderError, match="reserve"):
        compare(overrides, ["fedavg", "datasharing"], [0], tmp_path, extend=True)
    assert [o.config.method for o in compare(overrides, ["fedavg", "fedprox"], [0], tmp_path, extend=True)][
        -1
    ] == "fedprox"
    assert stored_plan(tmp_path, "comparison").methods == ["fedavg", "fedprox"]
