"""feddpc.simulate with one's own module, data, partition and method, and the Result it returns."""

import ast
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import feddpc
import feddpc.flower
from feddpc.errors import BadInputError, DataError
from feddpc.methods.feddpc import FedDPC
from support import blobs, tiny_net, uneven


def simulate(**more):
    values = {
        "data": blobs(),
        "model": tiny_net(),
        "partition": uneven(90),
        "cohort": 3,
        "rounds": 4,
        "batch_size": 4,
        "engine": "loop",
    }
    return feddpc.simulate(**(values | more))


def test_own_module_data_and_partition(tmp_path):
    module = tiny_net()
    before = [p.clone() for p in module.parameters()]
    result = simulate(model=module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert result.status == "finished"
    assert result.test_accuracy.shape == result.train_loss.shape == result.test_loss.shape == (4,)
    assert result.best_accuracy == result.test_accuracy.max()
    assert result.curve("mean_scale")[0] == pytest.approx(2.0)
    module.load_state_dict(result.state_dict)
    x = (torch.from_numpy(blobs().x_test.transpose(0, 3, 1, 2)).float() - 127.5) / 127.5
    accuracy = (module(x).argmax(1).numpy() == blobs().y_test).mean()
    assert accuracy == pytest.approx(result.test_accuracy[-1])
    result.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_it_learns():
    result = simulate(rounds=40, client_lr=0.2, method="fedavg", cohort=8)
    assert result.best_accuracy > 0.9
    assert result.test_accuracy[0] < 0.9


def test_plain_tensors_and_no_images():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=gen)
    y = (x[:, 0] > 0).long()
    result = feddpc.simulate(
        data=(x, y, x, y), model=nn.Linear(5, 2), clients=6, cohort=3, rounds=30, client_lr=0.5, partition="iid"
    )
    assert result.config.scaling == "none"
    assert result.best_accuracy > 0.9


def test_method_as_name_class_or_instance():
    by_name = simulate(method="feddpc", hyper={"lam": 0.5})
    by_instance = simulate(method=FedDPC(lam=0.5))
    assert by_name.records[-1]["test_loss"] == by_instance.records[-1]["test_loss"]
    assert simulate(method=FedDPC).config.hyper["lam"] == 1.0
    with pytest.raises(BadInputError, match="hyper is for a method given by name"):
        simulate(method=FedDPC(), hyper={"lam": 2.0})


def test_own_folder_and_resume(tmp_path):
    whole = simulate(rounds=6)
    simulate(rounds=3, out=tmp_path / "r")
    seen = []
    again = simulate(rounds=6, out=tmp_path / "r", resume=True, on_round=lambda r: seen.append(r["round"]))
    assert seen == [4, 5, 6]
    for name, value in whole.state_dict.items():
        assert torch.equal(value, again.state_dict[name])


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x.flatten(1)).relu()).relu())


def test_tied_weights_come_back_trained():
    module = Tied()
    result = simulate(model=module, rounds=3)
    assert torch.equal(result.state_dict["a.weight"], result.state_dict["b.weight"])
    assert not torch.equal(result.state_dict["a.weight"], module.a.weight)
    module.load_state_dict(result.state_dict)
    x = (torch.from_numpy(blobs().x_test.transpose(0, 3, 1, 2)).float() - 127.5) / 127.5
    assert (module(x).argmax(1).numpy() == blobs().y_test).mean() == pytest.approx(result.test_accuracy[-1])


def test_frozen_parameters_stay():
    module = tiny_net()
    module.body[0].weight.requires_grad_(False)
    result = simulate(model=module)
    assert torch.equal(result.state_dict["body.0.weight"], module.body[0].weight)
    assert not torch.equal(result.state_dict["head.weight"], module.head.weight)


NORMALIZED = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": NORMALIZED, "buffers": "refuse"}, "feddpc.models.to_groupnorm"),
        ({"model": nn.Linear(7, 3)}, "the model cannot take a sample of shape 1x6x6"),
        ({"data": ([[[1] * 6] * 6] * 90, [0, 1] * 45, [[[1] * 6] * 6] * 4, [0, 1] * 2)}, "type int64.*uint8.*float32"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 2))}, r"must give \[samples, 3\] scores"),
        ({"cohort": 9}, "cohort = 9"),
        ({"lr": 0.3, "client_lr": 0.2}, "lr = 0.3 and client_lr = 0.2"),
        ({"data": {}}, "data is of type dict"),
        ({"data": None}, "data is None"),
        ({"model": nn.Linear}, "model is the class Linear"),
        ({"model": None}, "model is None"),
        ({"method": 3}, "method is of type int"),
        ({"model": 3}, "model is of type int"),
        ({"partition": lambda labels: [[0]]}, "partition is of type function"),
        ({"partition": np.zeros(90, int)}, "partition is an array of 90 numbers"),
        ({"partition": [[0, 1], []], "cohort": 1}, "no samples for client 1"),
        ({"partition": [[0, 1], [900]], "cohort": 1}, "client 1 holds sample 900"),
        ({"partition": [[0]], "cohort": 2}, "cohort = 2"),
        ({"rouns": 3}, "did you mean 'rounds'"),
        ({"data": "mnust"}, "unknown data set"),
        ({"method": "fedsgd"}, "unknown method"),
        ({"participation": "sometimes"}, "unknown sampler 'sometimes'"),
        ({"data": (1, 2, 3)}, "data has 3 parts"),
    ],
)
def test_mistakes_are_explained(change, message):
    with pytest.raises(BadInputError, match=message):
        simulate(**change)


def test_lr_is_another_name_of_client_lr(tmp_path):
    one, other = simulate(lr=0.3, out=tmp_path / "r"), simulate(client_lr=0.3)
    assert one.config.lr == other.config.lr == 0.3
    assert one.records[-1]["test_loss"] == other.records[-1]["test_loss"]
    own = {"data": blobs(), "model": tiny_net(), "partition": uneven(90)}
    with pytest.warns(UserWarning, match="lr = 0.2"):
        assert feddpc.rerun(tmp_path / "r", lr=0.2, **own).config.lr == 0.2
    with pytest.raises(BadInputError, match=r"lr = 0.2 and client_lr = 0.1"):
        feddpc.rerun(tmp_path / "r", lr=0.2, client_lr=0.1, **own)


def test_a_model_that_counts_classes_from_one_is_explained():
    x, y = torch.randn(20, 4), torch.arange(20) % 5 + 1
    with pytest.raises(BadInputError, match=r"(?s)6.*class 0"):
        feddpc.simulate(data=(x, y, x, y), model=nn.Linear(4, 5), clients=2, cohort=1, partition="iid", rounds=1)


def test_bad_data_are_explained():
    x = torch.randn(10, 4)
    x[3, 1] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        feddpc.simulate(data=(x, torch.zeros(10).long(), x, torch.zeros(10).long()), model=nn.Linear(4, 2))
    with pytest.raises(DataError, match="-1"):
        feddpc.simulate(data=(torch.ones(2, 4), [0, -1], torch.ones(2, 4), [0, 1]), model=nn.Linear(4, 2))


def test_to_groupnorm_makes_it_work():
    assert simulate(model=feddpc.models.to_groupnorm(NORMALIZED), buffers="refuse").status == "finished"


def test_importing_is_cheap():
    """`import feddpc` brings in neither torch nor numpy, and costs under 0.3 s."""
    code = "import sys, time; t = time.time(); import feddpc\nprint(time.time() - t, 'torch' in sys.modules)"
    seconds, torch_loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert torch_loaded == "False"
    assert float(seconds) < 0.3


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['feddpc', '--help']\nfrom feddpc.cli import main\n"
        "try:\n main()\nfinally:\n print('torch' in sys.modules)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert time.perf_counter() - began < 5


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        feddpc.nonsense  # noqa: B018
    assert {name for name in feddpc.__all__ if not hasattr(feddpc, name)} == set()


def test_names_can_be_completed():
    """Editors and notebooks ask `dir`, before anything was imported."""
    code = "import feddpc, feddpc.flower; print(dir(feddpc)); print(dir(feddpc.flower))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, flower = (set(ast.literal_eval(line)) for line in done.stdout.splitlines())
    assert own >= {*feddpc.__all__, "__doc__", "__name__"}
    assert flower >= {"FedDPC", "FedAvg", "FaultyGrid", "client_app", "server_app", "strategy", "__doc__"}
    for name in flower:
        assert hasattr(feddpc.flower, name), name


def test_names_can_be_completed_without_flower(monkeypatch):
    def absent():
        raise BadInputError("flwr is not installed")

    monkeypatch.setattr(feddpc.flower, "check_flwr", absent)
    assert "strategy" in dir(feddpc.flower)


def test_a_result_is_shown_in_a_few_words(tmp_path):
    result = simulate(out=tmp_path / "r")
    again = feddpc.rerun(tmp_path / "r", data=blobs(), model=tiny_net(), partition=uneven(90))
    best = f"{100 * result.best_accuracy:.2f}"
    for shown in (repr(result), repr(again), repr([result])):
        assert len(shown) < 400
        assert shown.count("\n") < 4
        for part in ("feddpc", "blobs", "4", "finished", best):
            assert part in shown
        assert "tensor" not in shown
    assert "identical" in repr(again)
    assert repr(again).startswith("<Rerun")
    assert str(tmp_path) in repr(result)


def test_a_result_without_an_accuracy_is_shown_too():
    result = simulate(client_lr=1e30, rounds=2, method="fedavg")
    assert result.status == "diverged"
    assert "diverged" in repr(result)
    assert not result.best_accuracy > 1


def test_configuration_and_partition_have_short_reprs():
    result = feddpc.simulate(rounds=1, clients=20, cohort=2, method="fedavg", engine="loop")
    assert repr(result.config).startswith("Config(method='fedavg', model='")
    assert "dropout" not in repr(result.config)
    assert eval(repr(result.config), {"Config": feddpc.Config}) == result.config
    sizes = result.partition.sizes
    assert repr(result.partition) == f"Partition(20 clients, 1438 samples, {sizes.min()} to {sizes.max()} per client)"


@pytest.mark.parametrize("progress", [True, False])
def test_reading_torch_data_sets_is_shown(capsys, progress):
    rng = np.random.default_rng(0)
    samples = [(rng.standard_normal(3).astype(np.float32), i % 2) for i in range(30)]
    how = {"clients": 5, "cohort": 2, "rounds": 1, "engine": "loop", "progress": progress}
    feddpc.simulate(data=(samples[:20], samples[20:]), model=nn.Linear(3, 2), **how)
    told = capsys.readouterr().err
    assert ("30/30" in told) == progress
    feddpc.compare(["fedavg"], data=(samples[:20], samples[20:]), model=nn.Linear(3, 2), **how)
    assert ("30/30" in capsys.readouterr().err) == progress
