"""Tables, curves and page of runs whose primary metric is to be minimized, and is not measured in every round."""

import csv
import dataclasses
import io
import json

import numpy as np
import pytest

from feddpc.report.figures import curves
from feddpc.report.page import embed, render
from feddpc.report.page.embed import numbers
from feddpc.report.table import sweep_table
from feddpc.report.tables import as_csv, as_dicts, cells, collect, headings, rich_table, rows
from feddpc.study import choose
from feddpc.tasks.metrics import LOSS, Metric
from sweeping import outcome

MSE = Metric("mse", "min")


@pytest.fixture
def make_mse(make_run):
    """Return a maker of runs with these errors on the test set; None is a round that was not evaluated."""

    def make(method="fedavg", mse=(0.5,), **more):
        run = make_run(method, [0.0] * len(mse), **more)
        records = [
            {"round": r["round"], "test_mse": v, "test_loss": None if v is None else 2 * v}
            | {k: x for k, x in r.items() if not k.startswith(("round", "test_"))}
            for r, v in zip(run.records, mse, strict=True)
        ]
        return dataclasses.replace(run, records=records, metrics=(MSE, LOSS))

    return make


@pytest.fixture
def compared(make_mse):
    """Two methods with two seeds, evaluated every second round."""
    return [
        make_mse("fedavg", [None, 4.0, None, 2.0, None, 3.0], seed=0),
        make_mse("fedavg", [None, 6.0, None, 4.0, None, 5.0], seed=1),
        make_mse("feddpc", [None, 6.0, None, 1.0, None, 1.5], seed=0),
        make_mse("feddpc", [None, 6.0, None, 1.0, None, 2.5], seed=1),
    ]


def test_the_table_has_the_lowest_value_of_the_rounds_evaluated(compared):
    fedavg, feddpc = rows(compared)
    assert (fedavg.best, fedavg.best_round, fedavg.last10, fedavg.final) == (3.0, 4, 4.0, 4.0)
    assert (feddpc.best, feddpc.best_round, feddpc.final) == (1.0, 4, 2.0)
    assert (fedavg.leads, feddpc.leads) == (False, True)
    assert [name for name in headings([fedavg, feddpc]) if "mse" in name] == ["best mse", "last 10 mse", "final mse"]
    assert "lowest test mse" in headings([fedavg, feddpc])["best mse"]
    assert cells(fedavg)[2] == "3 ± 1.4"
    assert [str(column.header) for column in rich_table(rows(compared)).columns][2] == "best mse"
    assert as_dicts([feddpc])[0]["best_mse"] == 1.0
    lines = list(csv.DictReader(io.StringIO(as_csv(rows(compared)))))
    assert [(line["metric"], line["best_mse"], line["best"]) for line in lines] == [
        ("mse", "3.0", "false"),
        ("mse", "1.0", "true"),
    ]


def test_a_run_that_was_never_evaluated_has_no_value(make_mse):
    (row,) = rows([make_mse(mse=[None, None])])
    assert (row.best, row.final, row.leads, row.notes) == (None, None, False, ["no test mse"])
    assert len(curves([make_mse(mse=[None, None])]).axes) == 2
    assert "test mse" in render([make_mse(mse=[None, None])])


def test_rows_of_several_tasks_have_their_own_best_and_unit(make_mse, make_run):
    table = rows([make_run("fedavg", [0.5]), make_mse("feddpc", [0.25]), make_mse("fedcm", [0.75])])
    assert [(row.label, cells(row)[2], row.leads) for row in table] == [
        ("fedavg: accuracy (%)", "50.00", True),
        ("feddpc: mse", "0.25", True),
        ("fedcm: mse", "0.75", False),
    ]
    assert list(headings(table))[2] == "best"
    assert set(as_csv(table).splitlines()[0].split(",")) >= {"metric", "best_accuracy", "best_mse"}
    assert json.loads(json.dumps(as_dicts(table))) == as_dicts(table)


def test_curves_go_through_the_rounds_evaluated(compared):
    error, _ = curves(compared).axes
    assert error.get_title(loc="left") == "test mse"
    for line, expected in zip(error.lines, ([5.0, 3.0, 4.0], [6.0, 1.0, 2.0]), strict=True):
        x, y = line.get_data()
        assert (list(x), list(y)) == ([2, 4, 6], expected)
        assert line.get_marker() == "o"


def test_every_task_has_its_panel(make_mse, make_run):
    figure = curves([make_run("fedavg", [0.5, 0.6]), make_mse("feddpc", [0.25, 0.2])])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["test accuracy (%)", "test mse", "training loss"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 1, 2]


def test_the_page_names_the_metric_and_sorts_from_the_smallest(compared):
    text = render(compared)
    assert "the lowest test mse of any round" in text
    assert 'data-key="test_mse"' in text
    assert 'data-key="test_accuracy"' not in text
    assert text.count("data-first=ascending") == 3
    shown = numbers(compared)
    assert [group["rank"] for group in shown["groups"]] == [-4, -3]
    assert shown["runs"][0]["rounds"]["test_mse"] == [None, 4, None, 2, None, 3]
    assert shown["runs"][0]["notes"] == {}


def test_a_page_of_too_many_rounds_holds_those_that_were_evaluated(make_mse, monkeypatch):
    run = make_mse(mse=[float(t) if t % 10 == 0 else None for t in range(1, 101)])
    monkeypatch.setattr(embed, "MOST_VALUES", 300)
    rounds = numbers([run])["runs"][0]["rounds"]
    assert rounds["round"] == [1, *range(10, 101, 10)]
    assert rounds["test_mse"][1:] == list(range(10, 101, 10))


def test_a_stored_run_keeps_its_metric(make_mse, store, tmp_path):
    run = make_mse(mse=[None, 2.0, 1.0], folder=tmp_path / "a", status=None)
    store(run)
    (tmp_path / "a" / "environment.json").write_text(json.dumps({"metrics": [MSE.as_dict(), LOSS.as_dict()]}))
    (row,) = rows(collect(tmp_path))
    assert (row.metric, row.best) == (MSE, 1.0)
    damage = []
    (row,) = rows(collect(tmp_path, damage))
    assert (row.best, damage) == (1.0, [])


def test_a_metric_may_have_any_name(make_run):
    odd = Metric("<i>$x$[red]")
    run = make_run()
    records = [record | {odd.key(): 0.5} for record in run.records]
    run = dataclasses.replace(run, records=records, metrics=(odd, LOSS))
    assert "<i>" not in render([run])
    assert "test &lt;i&gt;$x$[red]" in render([run])
    figure = curves([run])
    figure.canvas.draw()
    assert figure.axes[0].get_title(loc="left") == "test <i>$x$[red]"
    assert str(rich_table(rows([run])).columns[2].header) == "best <i>$x$[red]"


def test_runs_of_one_configuration_with_other_metrics_are_noted(make_mse, make_run):
    (row,) = rows([make_run(accuracy=[0.5]), make_mse(mse=[0.25], seed=1)])
    assert (row.best, row.notes) == (0.5, ["no test accuracy in 1 of 2 seeds"])


def test_a_sweep_table_is_of_the_metric():
    results = [outcome(lr=lr, test=v, valid=v, at=v) for lr, v in ((0.1, 0.75), (0.2, 0.25))]
    results = [dataclasses.replace(result, metric=MSE) for result in results]
    (choice,) = choose(results)
    assert (choice.settings, choice.test) == ({"lr": 0.2}, 0.25)
    table = sweep_table([choice], "validation")
    assert table.rows[0][3:5] == ["0.25", "0.25"]
    assert "mse" in table.notes[0]
    assert np.all([len(row) == len(table.headings) for row in table.rows])
