"""Whole numbers that are to be predicted: the task says of which kind the targets of tables and arrays are."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import feddpc
from feddpc.data import Dataset
from feddpc.errors import BadInputError, DataError
from feddpc.tasks import NetworkTask
from feddpc.tasks.kinds import Regression

SHORT = {"rounds": 1, "clients": 5, "cohort": 2, "engine": "loop", "lr": 1e-13}
X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
PRICES = np.arange(60) * 7000 + 100_000


class OwnRegression(Regression):
    pass


@pytest.fixture
def table(tmp_path):
    rows = "".join(f"{x[0]},{x[1]},{price}\n" for x, price in zip(X, PRICES, strict=True))
    (tmp_path / "h.csv").write_text("area,rooms,price\n" + rows, encoding="utf-8")
    return str(tmp_path / "h.csv")


def arrays():
    return X[:50], PRICES[:50], X[50:], PRICES[50:]


@pytest.mark.parametrize("task", ["regression", OwnRegression])
def test_a_task_decides_how_a_table_is_read(task, table):
    options = {"data": table, "data_options": {"target": "price"}, "task": task}
    result = feddpc.simulate(**options, **SHORT)
    assert "test_mse" in result.metrics
    comparison = feddpc.compare(["fedavg"], **options, **SHORT)
    assert "test_mse" in comparison.results["fedavg", 0].metrics


@pytest.mark.parametrize("source", ["arrays", "torch", "npz", "npy", "function"])
def test_a_task_decides_how_arrays_are_read(source, tmp_path):
    fields = ("x_train", "y_train", "x_test", "y_test")
    named = dict(zip(fields, arrays(), strict=True))
    data = arrays()
    if source == "torch":
        x, y, x_test, y_test = map(torch.from_numpy, arrays())
        data = (TensorDataset(x, y), TensorDataset(x_test, y_test))
    elif source == "npz":
        np.savez(tmp_path / "d.npz", **named)
        data = tmp_path / "d.npz"
    elif source == "npy":
        for name, array in named.items():
            np.save(tmp_path / f"{name}.npy", array)
        data = tmp_path
    elif source == "function":
        (tmp_path / "mine.py").write_text(
            "import numpy as np\n"
            "def rows(targets=3):\n"
            "    x, y = np.ones((30, targets), np.float32), np.arange(30) * 9000\n"
            "    return x, y, x, y\n"
        )
        data = f"{tmp_path}/mine.py:rows"
    options = {"data_options": {"targets": 4}} if source == "function" else {}
    assert "test_mse" in feddpc.simulate(data=data, task="regression", **options, **SHORT).metrics


def test_what_is_named_in_the_options_counts(table):
    result = feddpc.simulate(data=table, data_options={"target": "price", "kind": "floats"}, **SHORT)
    assert "test_mse" in result.metrics
    data = (X, np.arange(60) % 3, X, np.arange(60) % 3)
    with pytest.raises(BadInputError, match="data_options"):
        feddpc.simulate(data=data, data_options={"target": "classes"}, task="regression", **SHORT)


def test_a_ready_data_set_of_another_kind_is_refused_with_the_remedy_for_it():
    y = np.arange(60) % 3
    data = Dataset.from_arrays(X, y, X, y)
    with pytest.raises(BadInputError, match=r"Dataset\.from_arrays\(.*'floats'"):
        feddpc.simulate(data=data, task="regression", **SHORT)
    with pytest.raises(BadInputError, match="other data"):
        feddpc.simulate(data="digits", task="regression", **SHORT)


def test_without_a_task_large_whole_numbers_are_refused_and_regression_is_named():
    with pytest.raises(DataError, match="regression"):
        feddpc.simulate(data=arrays(), **SHORT)


def test_text_cannot_be_predicted_as_a_number(tmp_path):
    (tmp_path / "t.csv").write_text("a,kind\n" + "1,cat\n2,dog\n" * 20, encoding="utf-8")
    with pytest.raises(BadInputError, match="column 'kind'"):
        feddpc.simulate(data=str(tmp_path / "t.csv"), data_options={"target": "kind"}, task="regression", **SHORT)


def test_a_task_without_a_kind_takes_what_is_there():
    class Any(NetworkTask):
        usual_loss = "cross-entropy"
        measured = ("accuracy",)

    y = np.arange(60) % 3
    assert "test_accuracy" in feddpc.simulate(data=(X, y, X, y), task=Any, **SHORT).metrics


def test_data_of_a_comparison_are_loaded_once_per_kind(table):
    from feddpc.config import Config
    from feddpc.study import setup_cache

    auto = Config(data=table, data_options={"target": "rooms"})
    found = setup_cache.dataset(auto)
    assert setup_cache.dataset(dataclasses.replace(auto, task="regression")) is found
