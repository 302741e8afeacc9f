"""Models, data sets and partitions of the user's own: from a file on the command line, and registered in Python."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import feddpc
from feddpc import config, methods, models
from feddpc.api import REGISTRIES
from feddpc.cli import app
from feddpc.data import load, schemes
from feddpc.data.loading import DATA
from feddpc.errors import BadInputError, DataError, RunFolderError
from feddpc.registry import Registry, refuse_code
from feddpc.report import tables
from feddpc.runs.record import load_config

OWN = """
from __future__ import annotations
from torch import nn
import numpy as np

class Net(nn.Module):
    def __init__(self, classes, channels, size, width=4, activation=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * size * size, width), activation(), nn.Linear(width, classes)
        )
    def forward(self, x):
        return self.layers(x)

def linear(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))

def nothing(classes):
    return 3

def broken(classes):
    raise ValueError("no such thing")

def demanding(classes, depth):
    return nn.Linear(depth, classes)

def rows():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
    return x, y, x[:12], y[:12]

def wrong():
    return 3

def alternating(labels, clients, offset=0):
    return [np.arange((j + offset) % clients, len(labels), clients) for j in range(clients)]

def too_few(labels):
    return [[0], [1]]
"""
QUICK = ["--clients", "6", "--cohort", "2", "--rounds", "2", "--engine", "loop", "--quiet"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def invoke(*args):
    done = CliRunner().invoke(app, list(args))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_run_of_ones_own_things_and_its_resume():
    parts = ["--data", "own.py:rows", "--model", "own.py:Net", "--partition", "own.py:alternating"]
    sets = ["--set", "model.width=7", "--set", "partition.offset=1"]
    assert invoke("run", *QUICK, *parts, *sets, "--out", "a").exit_code == 0
    stored = load_config(Path("a"))
    assert (stored.data, stored.model, stored.partition) == ("own.py:rows", "own.py:Net", "own.py:alternating")
    assert (stored.model_options, stored.partition_options) == ({"width": 7}, {"offset": 1})
    for how in (["--resume", "--out", "a", "--rounds", "3"], ["--like", "a", "--out", "b"]):
        with pytest.raises(BadInputError, match="names code, own"):
            invoke("run", *how, "--quiet")
        with pytest.raises(BadInputError, match="names code, own"):
            invoke("run", *how, "--quiet", *parts[:4])
        assert invoke("run", *how, "--quiet", *parts).exit_code == 0
    with pytest.raises(BadInputError, match="names code, own"):
        feddpc.rerun("a")
    again = feddpc.rerun("a", data="own.py:rows", model="own.py:Net", partition="own.py:alternating")
    assert again.likeness.rounds == 3
    assert again.likeness.identical


def test_tables_show_names_not_paths():
    invoke("compare", *QUICK, "--methods", "fedavg", "--model", "own.py:Net", "--out", "c/one")
    invoke("compare", *QUICK, "--methods", "fedavg", "--model", "own.py:linear", "--out", "c/two")
    labels = {row["label"] for row in tables.as_dicts(tables.rows(tables.collect(Path("c"), [])))}
    assert labels == {"fedavg model=Net model.width=4", "fedavg model=linear"}
    with pytest.raises(BadInputError, match="names code, own"):
        invoke("compare", "--resume", "--out", "c/one", "--rounds", "3", "--quiet")
    assert invoke("compare", "--resume", "--out", "c/one", "--model", "own.py:Net", "--quiet").exit_code == 0


def test_a_sweep_of_ones_own_model():
    sweep = ["sweep", *QUICK, "--methods", "fedavg", "--grid", "lr=0.1,0.3", "--out", "s"]
    assert invoke(*sweep, "--model", "own.py:Net").exit_code == 0
    for again in (["sweep", "--out", "s"], ["sweep", "show", "s"]):
        with pytest.raises(BadInputError, match="names code, own"):
            invoke(*again)
    assert invoke("sweep", "--out", "s", "--model", "own.py:Net", "--quiet").exit_code == 0


def test_a_changed_model_is_run_again_in_a_sweep_and_named():
    sweep = ["sweep", *QUICK, "--methods", "fedavg", "--grid", "lr=0.1", "--model", "own.py:Net", "--out", "s"]
    assert invoke(*sweep).exit_code == 0
    Path("own.py").write_text(OWN.replace("width=4", "width=5"))
    with pytest.warns(UserWarning, match=r"own\.py changed"):
        assert invoke(*sweep).exit_code == 0
    widths = {load_config(run).model_options["width"] for run in Path("s/items").iterdir()}
    assert widths == {4, 5}


def test_a_changed_model_is_named_when_a_comparison_is_resumed():
    compare = ["compare", *QUICK, "--methods", "fedavg", "--model", "own.py:Net", "--out", "c"]
    assert invoke(*compare).exit_code == 0
    Path("own.py").write_text(OWN + "# other\n")
    with pytest.warns(UserWarning, match=r"own\.py changed"), pytest.raises(RunFolderError, match="code of Net"):
        invoke(*compare, "--resume")


def test_an_extended_sweep_does_not_run_code_that_only_its_folder_names():
    sweep = ["sweep", *QUICK, "--grid", "lr=0.1", "--out", "s"]
    Path("mine.py").write_text("from feddpc.methods import FedAvg\nclass Mine(FedAvg):\n    name = 'mine'\n")
    assert invoke(*sweep, "--methods", "mine.py:Mine").exit_code == 0
    with pytest.raises(BadInputError, match="names code, mine"):
        invoke(*sweep, "--methods", "fedavg", "--extend")
    assert invoke(*sweep, "--methods", "mine.py:Mine,fedavg", "--extend").exit_code == 0


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--model", "own.py:Nett", "unknown model in own.py 'Nett'"),
        ("--model", "own.py", "name one"),
        ("--model", "none.py:Net", "there is no file none.py"),
        ("--model", "own.py:nothing", "returned a int"),
        ("--model", "own.py:broken", "ValueError: no such thing"),
        ("--model", "own.py:demanding", "needs depth"),
        ("--partition", "own.py:too_few", "returned 2 clients"),
        ("--partition", "own.py:wrong", "returned a int"),
    ],
)
def test_mistakes(flag, name, message):
    with pytest.raises(BadInputError, match=message):
        invoke("run", *QUICK, flag, name)
    with pytest.raises(DataError, match="must return a Dataset"):
        load("own.py:wrong")


def test_a_table_of_numbers_takes_an_mlp(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "table.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    for model in ("mlp", "auto"):
        out = f"table-{model}"
        done = invoke("run", *QUICK, "--data", "table.npz", "--model", model, "--out", out, "--json")
        assert done.exit_code == 0
        assert load_config(Path(out)).model == "mlp"
        assert json.loads(done.stdout)["rounds"] == 2
    with pytest.raises(BadInputError, match="5 float32, but the model 'cnn' is for square images"):
        invoke("run", *QUICK, "--data", "table.npz", "--model", "cnn")


def test_an_image_that_is_not_square_takes_an_mlp():
    x, y = np.zeros((6, 4, 8), np.uint8), [0, 1, 2, 0, 1, 2]
    data = feddpc.Dataset.from_arrays(x, y, x, y)
    assert models.default_name(data) == "mlp"
    assert models.make_for(data, "mlp", {}, 0)(torch.zeros(2, 1, 4, 8)).shape == (2, 3)


def test_registered_things_are_found_by_name():
    def rotated(labels, clients, seed):
        return schemes.make("iid", labels, clients, seed=seed)

    added = [("model", "linear"), ("data", "three"), ("partition", "rotated")]
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    try:
        feddpc.register("model", "linear", lambda classes, shape: torch.nn.Linear(shape[0], classes))
        feddpc.register("partition", "rotated")(rotated)
        feddpc.register("data", "three", lambda: (x, np.arange(30) % 3, x, np.arange(30) % 3))
        result = feddpc.simulate(
            data="three", model="linear", partition="rotated", rounds=1, clients=5, cohort=2, engine="loop"
        )
        assert result.status == "finished"
        assert (result.config.model, result.config.partition, result.config.data) == ("linear", "rotated", "three")
        with pytest.raises(BadInputError, match="is taken by"):
            feddpc.register("model", "linear", torch.nn.Linear)
    finally:
        for kind, name in added:
            REGISTRIES[kind].entries.pop(name, None)


def test_what_cannot_be_registered():
    with pytest.raises(BadInputError, match="unknown kind 'modle'"):
        feddpc.register("modle", "x", torch.nn.Linear)
    with pytest.raises(BadInputError, match="give a function or a class"):
        feddpc.register("model", "x", 3)
    with pytest.raises(BadInputError, match="does not end with"):
        feddpc.register("model", "x.py", torch.nn.Linear)
    with pytest.raises(BadInputError, match="a subclass of"):
        feddpc.register("method", "x", torch.nn.Linear)


@pytest.mark.parametrize("name", [n for n, facts in config.keys().items() if facts.kind and facts.choices])
def test_the_configuration_lists_what_is_registered(name):
    registered = REGISTRIES[config.keys()[name].kind].names()
    if name == "participation":
        registered.remove("fixed")
    assert [*(("auto",) if name == "engine" else ()), *registered] == list(config.choices_of(name))


def test_only_code_is_refused():
    refuse_code(Path("f"), ["feddpc", "data.npz", "a.py:b"], ["a.py:b"])
    assert methods.METHODS.get("feddpc") is methods.FedDPC
    assert Registry("thing", {}).names() == []


def test_options_of_data_are_checked(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,0\n2,1\n")
    table, arrays = tmp_path / "t.csv", (np.zeros((4, 2)), [0, 1, 0, 1]) * 2
    for source, options, words in (
        (table, {}, r"needs data\.target"),
        (table, {"target": "b", "clent": "a"}, "did you mean 'client'"),
        (arrays, {"targt": "floats"}, "did you mean 'target'"),
    ):
        with pytest.raises(BadInputError, match=words):
            feddpc.simulate(data=source, data_options=options, rounds=1, clients=1, cohort=1)


def test_a_quick_change_of_code_is_noticed_where_python_keeps_bytecode(monkeypatch):
    """Python itself takes a file for unchanged if its size and its time in whole seconds are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = Path("quick.py")
    text = "import torch\n\ndef made():\n    return 1\n"
    found = []
    for version in (text, text.replace("1", "2")):
        path.write_text(version)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        found.append(DATA.get("quick.py:made")())
    assert found == [1, 2]
