"""Keys: equal exactly where the numbers are equal."""

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from feddpc.config import Config
from feddpc.errors import BadInputError, DataError
from feddpc.study import RunSpec, setup_cache
from sweeping import SMALL, config

BASE = RunSpec(config())


@pytest.mark.parametrize(
    "same",
    [
        {"engine": "stacked"},
        {"device": "auto"},
        {"threads": 1},
        {"client_memory": "host"},
        {"server_lr": 0.1},
        {"hyper": {"lam": 1.0}},
        {"hyper": {"lam": 1}},
        {"scaling": "half"},
        {"reserve": 0.0},
        {"partition_options": {"alpha": 0.2}},
        {"partition_options": {"alpha": 0.2}, "alpha": 7.0},
        {"model_options": {"hidden": (8,)}},
    ],
    ids=str,
)
def test_what_does_not_change_the_numbers_does_not_change_the_key(same):
    assert RunSpec(config(**same)).key == BASE.key


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 0.2},
        {"server_lr": 0.2},
        {"seed": 1},
        {"rounds": 5},
        {"method": "fedavg"},
        {"hyper": {"lam": 2.0}},
        {"validation": 0.2},
        {"alpha": 0.3},
        {"partition": "iid"},
        {"precision": "float64"},
        {"model_options": {"hidden": [9]}},
        {"batch_size": 8},
        {"epochs": 2},
        {"dropout": 0.1},
        {"weighting": "samples"},
        {"augment": True},
        {"lr_decay": 0.9},
        {"participation": "bernoulli"},
        {"reserve": 0.1},
    ],
    ids=str,
)
def test_what_changes_the_numbers_changes_the_key(other):
    assert RunSpec(config(**other)).key != BASE.key


def test_alpha_counts_only_where_the_partition_has_one():
    one, other = (RunSpec(config(partition="iid", alpha=a)).key for a in (0.2, 0.9))
    assert one == other


def test_a_version_with_more_keys_finds_the_old_results():
    @dataclass(frozen=True, kw_only=True)
    class Later(Config):
        momentum: float = 0.0

    assert RunSpec(Later(**SMALL)).key == BASE.key
    assert RunSpec(Later(**SMALL, momentum=0.9)).key != BASE.key


def test_label_and_tags_do_not_tell_runs_apart():
    assert RunSpec(BASE.config, "a name", {"table": 2}).key == BASE.key


def test_a_complete_configuration_is_its_own_completion():
    again = RunSpec(BASE.complete)
    assert again.complete == BASE.complete
    assert again.key == BASE.key


def test_the_key_is_the_same_in_another_process():
    code = (
        "import json, sys; from feddpc.study import RunSpec; from feddpc.config import Config;"
        "print(RunSpec(Config.read(json.loads(sys.argv[1]))).key)"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(SMALL)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == BASE.key
    assert pickle.loads(pickle.dumps(BASE)).key == BASE.key


def test_data_count_by_content_not_by_name(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    for name, labels in (("a", y), ("b", y), ("c", np.roll(y, 1))):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=labels, x_test=x[:9], y_test=y[:9])
    keys = {n: RunSpec(config(data=str(tmp_path / f"{n}.npz"), clients=3)).key for n in "abc"}
    assert keys["a"] == keys["b"] != keys["c"]
    monkeypatch.chdir(tmp_path)
    assert RunSpec(config(data="a.npz", clients=3)).key == keys["a"]


def test_every_row_of_data_in_files_counts(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (600, 8, 8), dtype=np.uint8), np.arange(600) % 3

    def key_of(**change):
        arrays = {"x_train": x, "y_train": y, "x_test": x[:90], "y_test": y[:90]} | change
        np.savez(tmp_path / "d.npz", **arrays)
        return RunSpec(config(data=str(tmp_path / "d.npz"), clients=3)).key

    other = x.copy()
    other[7] = 255 - other[7]
    keys = [key_of(), key_of(x_train=other), key_of(x_test=other[:90]), key_of()]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_a_method_of_ones_own_counts_by_its_code(tmp_path):
    code = (
        "from dataclasses import dataclass\nfrom feddpc.methods import Method\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Method):\n    name = 'mine'\n"
    )
    for name, text in (("a", code), ("b", code), ("c", code + "# other\n")):
        (tmp_path / f"{name}.py").write_text(text)
    keys = {n: RunSpec(config(method=f"{tmp_path / n}.py:Mine")).key for n in "abc"}
    assert keys["a"] == keys["b"] != keys["c"]


def test_absent_data_name_the_command_that_gets_them(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"run `feddpc data get cifar100`"):
        _ = RunSpec(Config(data="cifar100")).key


def test_a_mistake_is_said_before_anything_runs():
    with pytest.raises(BadInputError, match="mu = -1"):
        _ = RunSpec(config(method="fedprox", hyper={"mu": -1})).key


def test_worlds_are_shared_and_rates_are_not():
    setup_cache._cache.clear()
    first = setup_cache.experiment(BASE.complete)
    second = setup_cache.experiment(replace(BASE.complete, method="fedavg", hyper={}, lr=0.5, server_lr=0.7, rounds=9))
    assert second.task is first.task
    assert second.data is first.data
    assert second.partition is first.partition
    assert second.population.rates(1) == (0.5, 0.7)
    assert second.config.rounds == 9
    assert first.population.rates(1) == (0.1, 0.1)
    assert setup_cache.experiment(replace(BASE.complete, seed=1)).data is first.data


def test_one_path_in_two_folders_is_two_worlds(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    found = []
    for place, labels in (("a", y), ("b", np.roll(y, 1))):
        (tmp_path / place).mkdir()
        np.savez(tmp_path / place / "d.npz", x_train=x, y_train=labels, x_test=x[:9], y_test=y[:9])
        monkeypatch.chdir(tmp_path / place)
        item = RunSpec(config(data="d.npz", clients=3))
        found.append(setup_cache.experiment(item.complete).data.y_train.tolist())
    assert found == [y.tolist(), np.roll(y, 1).tolist()]


def test_only_a_few_worlds_are_kept():
    kept = [setup_cache.experiment(replace(BASE.complete, seed=seed)).task for seed in range(3)]
    assert setup_cache.experiment(replace(BASE.complete, seed=2)).task is kept[2]
    assert setup_cache.experiment(replace(BASE.complete, seed=0)).task is not kept[0]


OWN = """
import numpy as np
from torch import nn

def net(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))

def alternating(labels, clients):
    return [np.arange(j, len(labels), clients) for j in range(clients)]

def rows():
    x, y = np.arange(300, dtype=np.float32).reshape(60, 5) / 300, np.arange(60) % 3
    return x, y, x[:12], y[:12]
"""


@pytest.mark.parametrize(("key", "name"), [("model", "net"), ("partition", "alternating"), ("data", "rows")])
def test_ones_own_code_counts_by_the_content_of_its_file(tmp_path, key, name):
    def key_of(file):
        given = {"model_options": {}} if key == "model" else {}
        return RunSpec(config(**{key: f"{tmp_path / file}.py:{name}"}, **given)).key

    for file, text in (("a", OWN), ("b", OWN), ("c", OWN.replace("j, len", "j + 0, len"))):
        (tmp_path / f"{file}.py").write_text(text)
    before = key_of("a")
    assert before == key_of("b") != key_of("c")
    (tmp_path / "a.py").write_text(OWN.replace("j, len", "j + 0, len"))
    assert key_of("a") == key_of("c")


def test_a_changed_file_is_loaded_again_in_the_same_process(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    spec = RunSpec(config(model=f"{tmp_path}/own.py:net", model_options={}))
    first = setup_cache.experiment(spec.complete).task.d
    (tmp_path / "own.py").write_text(OWN.replace("classes))", "classes, bias=False))"))
    assert setup_cache.experiment(RunSpec(spec.config).complete).task.d == first - 10


@pytest.mark.parametrize("key", ["loss", "transform", "metrics"])
def test_a_changed_function_is_another_run(tmp_path, key):
    path = tmp_path / "own.py"
    values = {"data": "digits", "rounds": 1, key: f"{path}:f" if key != "metrics" else f"accuracy,{path}:f"}
    keys = []
    for factor in (1, 2):
        path.write_text(
            "import torch.nn.functional as F\n"
            + (
                f"def f(x, u): return {factor} * x\n"
                if key == "transform"
                else f"def f(o, t): return {factor} * F.cross_entropy(o, t, reduction='none')\n"
            )
        )
        keys.append(RunSpec(Config(**values)).key)
    assert keys[0] != keys[1]
