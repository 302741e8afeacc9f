"""Settings that must not be ignored, models that must be those that were measured, and code that must not run."""

import functools
import json
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import feddpc
from feddpc import flower, methods
from feddpc.cli import app
from feddpc.config import Config
from feddpc.data.schemes import PARTITIONS
from feddpc.errors import BadInputError, RunFolderError
from feddpc.methods import FedAdam
from feddpc.schedules import name_of_schedule
from feddpc.study import RunSpec
from feddpc.tasks.losses import LOSSES

SMALL = {"data": "digits", "model": "mlp", "clients": 10, "cohort": 3, "engine": "loop", "rounds": 2}
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((40, 3)).astype(np.float32), RNG.standard_normal((40, 2)).astype(np.float32)
PAIRS = (X[:30], Y[:30], X[30:], Y[30:])


@pytest.mark.parametrize(
    ("file", "table", "command"),
    [
        ("compare.json", {"methods": ["fedavg"], "config": {"metrics": ["evil.py:f"]}}, ["compare", "--resume"]),
        ("compare.json", {"methods": ["evil.py:M"], "set": ["lam=1"]}, ["compare", "--resume"]),
        ("sweep.toml", 'methods = ["fedavg"]\nseeds = [0]\ngrid = ["loss=evil.py:f"]\n', ["sweep"]),
        ("sweep.toml", 'methods = ["evil.py:M"]\nseeds = [0]\ngrid = ["lr=0.1"]\nset = ["lam=1"]\n', ["sweep"]),
    ],
)
def test_a_folder_cannot_make_its_reader_run_code(tmp_path, monkeypatch, file, table, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\ndef f(o, t): return 0\nclass M: pass\n")
    (tmp_path / "x").mkdir()
    text = table if isinstance(table, str) else json.dumps({"runs": [], "seeds": [0], "config": {}, **table})
    (tmp_path / "x" / file).write_text(text)
    result = CliRunner().invoke(app, [*command, "--out", "x", "--quiet"])
    assert result.exit_code != 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"evaluate_clients": True},
        {"keep": "best"},
        {"validation": 0.1},
        {"reserve": 0.1},
    ],
)
def test_a_federation_refuses_what_only_the_simulator_has(values):
    (name,) = values
    with pytest.raises(BadInputError, match=name):
        flower.strategy("fedavg", model=nn.Linear(3, 2), classes=2, clients=4, cohort=2, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"privacy": {"clip": 1.0, "epsilon": 8.0}, "participation": "poisson", "clients": 200, "cohort": 10},
        {"lr_schedule": "cosine", "clients": 4, "cohort": 2},
    ],
)
def test_a_federation_runs_the_rounds_that_budget_and_schedule_were_made_for(values):
    made = flower.strategy("fedavg", model=nn.Linear(3, 2), classes=2, rounds=5, **values)
    made.check_rounds(5)
    with pytest.raises(BadInputError, match="rounds=50"):
        made.check_rounds(50)


def test_a_resumed_run_does_not_lose_its_clipping(tmp_path):
    feddpc.simulate(**SMALL, clip_norm=0.1, out=tmp_path / "run")
    with pytest.raises(RunFolderError, match="clip_norm"):
        feddpc.simulate(**(SMALL | {"rounds": 3}), out=tmp_path / "run", resume=True)


def test_a_resumed_run_notices_changed_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import torch.nn.functional as F\ndef f(o, t): return F.cross_entropy(o, t, reduction='none') * 1\n"
    (tmp_path / "own.py").write_text(text)
    feddpc.simulate(**SMALL, loss="own.py:f", out="run")
    (tmp_path / "own.py").write_text(text.replace("* 1", "* 9"))
    with pytest.raises(RunFolderError, match="code"):
        feddpc.simulate(**(SMALL | {"rounds": 3}), loss="own.py:f", out="run", resume=True)


def losses_with(weights):
    """The same source twice, with other values."""

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=weights.to(outputs.dtype), reduction="none")

    return loss


@pytest.mark.parametrize("kind", ["loss", "transform", "metrics", "lr_schedule"])
def test_a_resumed_run_notices_other_values_in_the_users_functions(tmp_path, kind):
    def functions(value):
        weights = torch.ones(10) * value

        def shifted(x, uniforms):
            return x + weights[0]

        def metric(outputs, targets):
            return float(weights[0])

        return {
            "loss": losses_with(weights),
            "transform": shifted,
            "metrics": metric,
            "lr_schedule": functools.partial(lambda t, w: 0.5 * float(w[0]), w=weights),
        }[kind]

    feddpc.simulate(**SMALL, **{kind: functions(1.0)}, out=tmp_path / "run")
    with pytest.raises(RunFolderError, match=kind):
        feddpc.simulate(**(SMALL | {"rounds": 3}), **{kind: functions(0.5)}, out=tmp_path / "run", resume=True)
    more = feddpc.simulate(**(SMALL | {"rounds": 3}), **{kind: functions(1.0)}, out=tmp_path / "run", resume=True)
    assert len(more.records) == 3


@pytest.mark.parametrize(
    ("kind", "attribute", "values"), [("transform", "uniforms", (1, 2)), ("metrics", "direction", ("min", "max"))]
)
def test_a_resumed_run_notices_what_is_said_beside_a_function(tmp_path, kind, attribute, values):
    def given(value):
        function = (lambda x, uniforms: x) if kind == "transform" else (lambda outputs, targets: 1.0)
        setattr(function, attribute, value)
        return {kind: function}

    feddpc.simulate(**SMALL, **given(values[0]), out=tmp_path / "run")
    with pytest.raises(RunFolderError, match=kind):
        feddpc.simulate(**(SMALL | {"rounds": 3}), **given(values[1]), out=tmp_path / "run", resume=True)


def test_a_run_is_resumed_with_the_same_object_that_accumulates(tmp_path):
    class Mean:
        def __init__(self, scale):
            self.scale = scale
            self.reset()

        def reset(self):
            self.total = torch.zeros(())

        def to(self, device):
            return self

        def update(self, outputs, targets):
            self.total = self.total + outputs.sum()

        def compute(self):
            return self.scale * self.total

    metric = Mean(2.0)
    feddpc.simulate(**SMALL, metrics=[metric], out=tmp_path / "run")
    assert metric.total != 0
    assert (
        len(feddpc.simulate(**(SMALL | {"rounds": 3}), metrics=[metric], out=tmp_path / "run", resume=True).records)
        == 3
    )
    with pytest.raises(RunFolderError, match="metrics"):
        feddpc.simulate(**(SMALL | {"rounds": 4}), metrics=[Mean(3.0)], out=tmp_path / "run", resume=True)


def test_registered_functions_count_by_what_they_compute(tmp_path, monkeypatch):
    keys = []
    for value in (1.0, 2.0):
        monkeypatch.setitem(LOSSES.entries, "mine", losses_with(torch.ones(10) * value))
        keys.append(RunSpec(Config.read({**SMALL, "loss": "mine"})).key)
        if value == 1.0:
            feddpc.simulate(**SMALL, loss="mine", out=tmp_path / "run")
    assert keys[0] != keys[1]
    with pytest.raises(RunFolderError, match="mine"):
        feddpc.simulate(**(SMALL | {"rounds": 3}), loss="mine", out=tmp_path / "run", resume=True)


def test_schedules_are_told_apart_by_what_they_hold():
    def made(milestones):
        return lambda t: 0.5 ** sum(t > m for m in milestones)

    assert name_of_schedule(made([1, 2])) != name_of_schedule(made([99]))
    two = [functools.partial(lambda t, a: a, a=a) for a in (0.5, 0.25)]
    assert name_of_schedule(two[0]) != name_of_schedule(two[1])


@pytest.mark.parametrize(("method", "hyper"), [("fedamd", {}), ("scaffold", {"warm": True})])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_methods_that_survey_work_with_server_optimizers(method, hyper, optimizer):
    result = feddpc.simulate(**SMALL, method=method, hyper=hyper, server_optimizer=optimizer)
    assert result.status == "finished"


def test_a_loss_with_several_values_per_sample_is_refused():
    with pytest.raises(BadInputError, match="one value per sample"):
        feddpc.simulate(data=PAIRS, model=nn.Linear(3, 2), clients=5, cohort=2, loss=lambda o, t: (o - t) ** 2)


@pytest.mark.parametrize(("loss", "data"), [("squared", "digits"), ("cross-entropy", PAIRS), ("logistic", "digits")])
def test_named_losses_belong_to_kinds_of_targets(loss, data):
    with pytest.raises(BadInputError, match="loss"):
        feddpc.simulate(data=data, model=nn.Linear(3, 2) if data is PAIRS else "mlp", clients=5, cohort=2, loss=loss)


def test_an_own_method_keeps_its_usual_rate():
    class Mine(FedAdam):
        name: ClassVar[str] = "mine"

    assert feddpc.simulate(**SMALL, method=Mine).config.server_lr == 0.01
    compared = feddpc.compare([Mine], **SMALL)
    assert next(iter(compared.results.values())).config.server_lr == 0.01


def test_fine_tuning_uses_the_clients_optimizer():
    how = SMALL | {"evaluate_clients": True, "finetune_steps": 3}
    result = feddpc.simulate(**how, clip_norm=1e-12)
    assert result.clients["finetuned_loss"] == pytest.approx(result.clients["loss"], abs=1e-6)


@pytest.mark.parametrize(("method", "hyper"), [("feddyn", {"evaluate": "clients"}), ("fedexp", {"evaluate": "pair"})])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_model_that_is_kept_is_the_one_that_was_measured(method, hyper, keep):
    result = feddpc.simulate(**(SMALL | {"rounds": 4}), method=method, hyper=hyper, keep=keep)
    data = feddpc.data.load("digits")
    x = (torch.from_numpy(data.x_test).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        accuracy = (result.model(x).argmax(1).numpy() == data.y_test).mean()
    measured = max(result.test_accuracy) if keep == "best" else result.test_accuracy[-1]
    assert accuracy == pytest.approx(measured)


def test_values_of_clients_survive_a_callback_that_fails_and_a_resume(tmp_path):
    class Fails(feddpc.Callback):
        def on_round_end(self, run):
            if run.round == 2:
                raise ValueError("no")

    how = SMALL | {"evaluate_clients": True}
    with pytest.raises(ValueError, match="no"):
        feddpc.simulate(**how, out=tmp_path / "run", callbacks=[Fails()])
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["round"] == 2
    again = feddpc.simulate(**how, out=tmp_path / "run", resume=True)
    assert len(again.clients["accuracy"]) == 10


def test_names_of_metrics_may_have_blanks_between_them():
    assert set(feddpc.simulate(**SMALL, metrics="f1, accuracy").metrics) == {"test_f1", "test_accuracy", "test_loss"}


def test_methods_names_are_those_of_the_table():
    assert {"fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova"} <= set(methods.names())


@pytest.mark.parametrize(
    "values",
    [
        {"model_options": {"hidden": 3}, "model": nn.Linear(3, 2)},
        {"partition_options": {"min_size": 3}, "partition": [range(15), range(15, 30)]},
        {"data_options": {"target": "floats"}, "data": feddpc.Dataset.from_arrays(*PAIRS)},
        {"server_optimizer": "adam", "method": "fedadam"},
    ],
)
def test_options_that_would_do_nothing_are_refused(values):
    how = {"data": PAIRS, "model": nn.Linear(3, 2), "clients": 5, "cohort": 2, "rounds": 1} | values
    with pytest.raises(BadInputError, match=next(iter(values))):
        feddpc.simulate(**how)


LABELED = (X[:30], np.arange(30) % 3, X[30:], np.arange(10) % 3)
NATURAL = {"data": LABELED, "model": nn.Linear(3, 3), "client_ids": np.arange(30) % 5, "cohort": 2, "rounds": 1}


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 0.5, "partition": "iid"},
        {"alpha": 0.5, "partition_options": {"alpha": 0.3}},
        {"client_test": 0.3},
    ],
)
def test_settings_that_would_do_nothing_are_refused(tmp_path, values):
    (field, *_) = values
    with pytest.raises(BadInputError, match=field):
        feddpc.simulate(**SMALL, **values)
    with pytest.raises(BadInputError, match=field):
        feddpc.compare(["fedavg", "feddpc"], **SMALL, **values, out=tmp_path / "compared")
    assert not (tmp_path / "compared").exists()


@pytest.mark.parametrize("values", [{"clients": 100}, {"clients": 4}, {"alpha": 0.5}])
def test_natural_clients_are_not_changed_by_settings(values):
    (field,) = values
    with pytest.raises(BadInputError, match=field):
        feddpc.simulate(**NATURAL, **values)
    with pytest.raises(BadInputError, match=field):
        feddpc.compare(["fedavg"], **NATURAL, **values)


def test_settings_that_agree_with_the_data_and_defaults_are_accepted():
    assert feddpc.simulate(**NATURAL).config.clients == 5
    assert feddpc.simulate(**NATURAL, clients=5, alpha=0.2, client_test=0.2).config.clients == 5
    assert feddpc.simulate(**(SMALL | {"rounds": 1}), partition="iid", alpha=0.2).status == "finished"


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (["run", "--partition", "iid", "--alpha", "0.5"], "alpha"),
        (["run", "--client-test", "0.3"], "client_test"),
        (["compare", "--methods", "fedavg", "--partition", "iid", "--alpha", "0.5"], "alpha"),
        (["sweep", "--grid", "lr=0.1,0.2", "--partition", "iid", "--alpha", "0.5"], "alpha"),
        (["sweep", "--grid", "alpha=0.1,0.5", "--partition", "iid"], "alpha"),
        (["partition", "--partition", "iid", "--alpha", "0.5"], "alpha"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(tmp_path, monkeypatch, command, field):
    monkeypatch.chdir(tmp_path)
    small = [] if command[0] == "partition" else ["--rounds", "1", "--cohort", "2", "--model", "mlp", "--quiet"]
    result = CliRunner().invoke(app, [*command, "--clients", "10", *small])
    assert result.exit_code != 0
    assert isinstance(result.exception, BadInputError)
    assert field in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ['method = "fedavg"', "seed = 3"])
@pytest.mark.parametrize("command", [["compare"], ["sweep", "--grid", "lr=0.1,0.2"]])
def test_a_file_for_a_study_has_lists_of_methods_and_seeds(tmp_path, line, command):
    (tmp_path / "c.toml").write_text(line)
    result = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "x")])
    assert isinstance(result.exception, BadInputError)
    assert line.split()[0] in str(result.exception)


def test_a_sweep_over_partitions_may_share_what_some_of_them_use(tmp_path):
    grid = ["--grid", "partition=iid,dirichlet", "--alpha", "0.5", "--methods", "fedavg"]
    small = ["--clients", "10", "--rounds", "1", "--cohort", "2", "--model", "mlp", "--quiet"]
    assert CliRunner().invoke(app, ["sweep", *grid, *small, "--out", str(tmp_path / "s")]).exit_code == 0


def test_the_configuration_of_a_run_can_be_run_again(tmp_path):
    feddpc.simulate(**SMALL, partition="iid", out=tmp_path / "run")
    again = ["run", "--config", str(tmp_path / "run" / "config.toml"), "--out", str(tmp_path / "again"), "--quiet"]
    assert CliRunner().invoke(app, again).exit_code == 0


def test_a_schedule_over_the_rounds_of_a_run_says_how_to_go_on(tmp_path):
    feddpc.simulate(**SMALL, lr_schedule="cosine", out=tmp_path / "run")
    more = SMALL | {"rounds": 4, "lr_schedule": "cosine", "out": tmp_path / "run", "resume": True}
    with pytest.raises(RunFolderError, match=r"lr_schedule_options.*over.*2"):
        feddpc.simulate(**more)
    assert len(feddpc.simulate(**more, lr_schedule_options={"over": 2}).records) == 4


def test_a_number_of_clients_beside_a_partition_is_refused():
    with pytest.raises(BadInputError, match="clients = 5"):
        feddpc.simulate(data="digits", partition=[[0, 1, 2], [5, 3, 4]], clients=5, cohort=2, rounds=1)
    result = feddpc.simulate(data="digits", partition=[[0, 1, 2], [5, 3, 4]], clients=2, cohort=2, rounds=1)
    assert result.config.clients == 2


def test_a_refused_comparison_leaves_its_folder(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    given = {"data": "digits", "model": net, "rounds": 1, "seeds": [0], "out": tmp_path / "c"}
    with pytest.raises(BadInputError, match="buffers"):
        feddpc.compare(["fedavg"], **given, buffers="refuse")
    assert not (tmp_path / "c").exists()
    assert feddpc.compare(["fedavg"], **given, clients=20)


@pytest.mark.parametrize("partition", ["iid", "shards", [list(range(15)), list(range(15, 30))]])
def test_client_ids_beside_a_partition_that_does_not_use_them_are_refused(partition):
    with pytest.raises(BadInputError, match="client_ids"):
        feddpc.simulate(data=PAIRS, client_ids=np.arange(30) % 4, partition=partition, rounds=1)


def test_a_partition_of_ones_own_may_use_client_ids(monkeypatch):
    def halves(client_ids):
        return [np.flatnonzero(client_ids % 2 == rest) for rest in (0, 1)]

    monkeypatch.setitem(PARTITIONS.entries, "halves of ids", halves)
    ids = np.arange(30) % 4
    more = {"data": PAIRS, "client_ids": ids, "model": "mlp", "cohort": 2, "rounds": 1}
    assert len(feddpc.simulate(partition="halves of ids", clients=2, **more).partition) == 2
    assert len(feddpc.simulate(partition="natural", **more).partition) == 4
