"""Metrics other than accuracy: a run whose primary metric is to be minimized, and is not measured in every round."""

import dataclasses
import json
import math

import pytest

import feddpc
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.report.display import Display
from feddpc.runs.stored import load, read_metrics
from feddpc.runs.tracking.base import values
from feddpc.study import RunSpec, StudyPlan, choose, run_study
from feddpc.study.adaptive import OptunaSearch
from feddpc.study.overrides import Overrides
from feddpc.study.space import Range
from feddpc.study.sweep import write_tables
from feddpc.tasks import Classification, Metric, Task
from feddpc.tasks.measures import Measure
from feddpc.tasks.metrics import CLASSIFICATION, LOSS
from support import run_rounds, small_setting
from sweeping import config, outcome

MSE = Metric("mse", "min")
#: The values of the rounds that are evaluated: the second is the best.
VALUES = (4.0, 1.0, 2.0)


@pytest.fixture
def regression(monkeypatch):
    """Let classification measure a made-up error in rounds 2, 4 and 6 of 7, and nothing in the others."""
    calls = []

    def evaluate(self, w, batch_size=500):
        calls.append(w)
        t = len(calls)
        return {"mse": VALUES[t // 2 - 1], "loss": 1.0} if t % 2 == 0 else {}

    monkeypatch.setattr("feddpc.tasks.network.choose_measures", lambda *_: (Measure(MSE),))
    monkeypatch.setattr(Classification, "evaluate", evaluate)
    return calls


def simulate(**more):
    return feddpc.simulate(rounds=7, clients=20, cohort=2, method="fedavg", engine="loop", **more)


def test_records_and_summary_hold_the_metrics_by_name(regression, tmp_path):
    result = simulate(out=tmp_path / "r")
    assert list(result.records[0])[:3] == ["round", "test_mse", "test_loss"]
    assert [record["test_mse"] for record in result.records] == [None, 4.0, None, 1.0, None, 2.0, None]
    assert "test_accuracy" not in result.records[0]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["primary"] == {"name": "mse", "direction": "min", "percent": False, "label": ""}
    assert (summary["best_mse"], summary["best_round"]) == (1.0, 4)
    assert (summary["final_mse"], summary["last10_mse"]) == (2.0, pytest.approx(7 / 3))
    assert result.metrics == summary["metrics"] == {"test_mse": 2.0, "test_loss": 1.0}
    assert result.status == "finished"  # rounds without a loss have not diverged
    assert "best test mse 1" in repr(result)
    assert math.isnan(result.best_accuracy)
    assert result.plot().axes[0].get_title(loc="left") == "test mse"


def test_a_folder_is_read_without_the_task(regression, tmp_path, monkeypatch):
    simulate(out=tmp_path / "r")
    monkeypatch.undo()
    run = load(tmp_path / "r")
    assert run.metrics == (MSE, LOSS)
    assert "metrics" not in run.environment
    (tmp_path / "r" / "summary.json").unlink()  # as of a run that goes on
    assert load(tmp_path / "r").primary == MSE


def test_a_run_that_does_not_say_what_it_measured_is_a_classification():
    assert read_metrics(None, {}) == read_metrics(None, {"primary": 3}) == CLASSIFICATION
    assert read_metrics([{"name": 3}], {"primary": MSE.as_dict()}) == (MSE, LOSS)
    assert read_metrics([], {}) == read_metrics([{}], {}) == CLASSIFICATION


@pytest.mark.parametrize(
    "table",
    [
        *(None, {}, {"name": ""}, {"name": ["a"]}, {"name": "\x1b"}),
        *({"name": "a", "direction": "up"}, {"name": "a", "percent": 1}),
    ],
)
def test_a_table_that_describes_no_metric_is_refused(table):
    with pytest.raises(BadInputError):
        Metric.read(table)


def test_divergence_is_judged_by_the_loss(monkeypatch):
    monkeypatch.setattr("feddpc.tasks.network.choose_measures", lambda *_: (Measure(MSE),))
    setting = small_setting()

    def record(**found):
        monkeypatch.setattr(setting.task, "evaluate", lambda w: found)
        return run_rounds(setting, feddpc.methods.create("fedavg"), Loop(), 1)[1][0]

    assert record(mse=math.inf, loss=1.0).diverged is None
    assert record(mse=1.0, loss=math.inf).diverged
    assert record().diverged is None
    assert record().metrics == {"test_mse": None, "test_loss": None}


def test_a_task_has_no_evaluation_unless_it_says_so():
    assert Task.metrics == (LOSS,)
    assert Task.evaluate(small_setting().task, small_setting().w0) == {}


def test_the_progress_shows_the_metric(capsys):
    from rich.console import Console

    display = Display(Console())
    display.begin(config(rounds=1))
    display.round({"round": 1, "test_loss": 0.25, "train_loss": 0.5})
    assert "loss 0.25  best 0.25  loss 0.5000" in capsys.readouterr().out
    display.round({"round": 1, "test_loss": None, "train_loss": None})
    assert "loss -  best 0.25  loss -" in capsys.readouterr().out
    display.round({"round": 1, "test_own": 0.25, "test_loss": 1.0, "train_loss": 0.5})
    assert "own 0.25  loss 0.5000" in capsys.readouterr().out  # whether more or less is better is not known


def test_a_sweep_chooses_the_smallest_value(monkeypatch, tmp_path):
    monkeypatch.setattr("feddpc.tasks.network.choose_measures", lambda *_: (Measure(MSE),))
    monkeypatch.setattr(Classification, "evaluate", lambda self, w, size=500: {"mse": float(w.norm()), "loss": 1.0})
    specs = [RunSpec(config(method="fedavg", lr=lr, rounds=2)) for lr in (0.3, 1e-6)]
    results = run_study(specs, tmp_path)
    assert [result.metric for result in results] == [MSE, MSE]
    small = min(results, key=lambda result: result.best)
    for by in ("test", "validation"):
        (choice,) = choose(results, by)
        assert (choice.metric, choice.results, choice.test) == (MSE, [small], small.best)
    write_tables(tmp_path, None, results)
    chosen = json.loads((tmp_path / "chosen.json").read_text())
    assert chosen[0]["metric"]["direction"] == "min"
    assert chosen[0]["test_mse"] == chosen[0]["validation_mse"] == small.best
    assert "best_mse" in (tmp_path / "results.csv").read_text().splitlines()[0].split(",")


def test_a_search_maximizes_what_is_to_be_minimized_with_its_sign_changed():
    plan = StudyPlan(["fedavg"], [0], Overrides({"validation": 0.1}), None, "test")
    trial = [dataclasses.replace(outcome(test=value), metric=MSE) for value in (1.0, 3.0)]
    assert plan.score(trial) == -2.0
    assert plan.score([dataclasses.replace(trial[0], status="diverged"), trial[1]]) == -math.inf
    assert plan.score([dataclasses.replace(trial[0], best=None), trial[1]]) == -math.inf
    assert plan.score([outcome(test=0.5), outcome(test=0.7)]) == pytest.approx(0.6)
    assert plan.score([outcome(test=0.5, status="diverged")]) == 0.0


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "qmc"])
def test_samplers_take_the_worst_score(sampler):
    for package in ("optuna", "scipy", "cmaes"):
        pytest.importorskip(package)
    search = OptunaSearch({"lr": Range("log", 0.01, 1.0), "lam": Range("uniform", 0.0, 2.0)}, 16, 0, sampler, 2)
    while trials := search.ask():
        search.tell([-math.inf if trial["lr"] > 0.3 else -trial["lr"] for trial in trials])
    assert -0.3 <= search.study.best_value < 0


def test_trackers_get_all_metrics_of_the_rounds_evaluated():
    assert values({"round": 1, "test_mse": 0.5, "test_r2": 0.1, "test_loss": None}) == {"test_mse": 0.5, "test_r2": 0.1}


@pytest.mark.parametrize("name", ["loss", "round", "finetuned_loss"])
def test_a_metric_cannot_take_the_name_of_other_values(name):
    def mine(outputs, targets):
        return 42.0

    mine.__name__ = name
    with pytest.raises(BadInputError, match=name):
        feddpc.simulate(metrics=[mine], rounds=1, clients=20, cohort=2, engine="loop")
