"""What `feddpc bench` measures is the same work, and what cannot run is a line and no crash."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from feddpc import methods, models, sampling
from feddpc.bench import entrants, machine, server_times, turns
from feddpc.bench.eager import Eager, plain
from feddpc.bench.entrants import LocalEntrant
from feddpc.bench.workloads import WORKLOADS, TextWorkload, Workload
from feddpc.build import build
from feddpc.config import Config
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.round.round import run_round
from feddpc.round.state import RunState

SMALL = Workload("small", "small images, cnn", "cnn", 10, 8, 2000, test=100)
IMAGES = {name: w for name, w in WORKLOADS.items() if not isinstance(w, TextWorkload)}
TEXTS = {name: w for name, w in WORKLOADS.items() if isinstance(w, TextWorkload)}


def local(way, precision="float32", build=lambda _: lambda: None, **times):
    return LocalEntrant(way, "fedavg", precision, "cpu", build=build, **times)


class Refusing(Loop):
    name = "refusing"

    def refuses(self, task):
        return "it is Sunday"


class Broken(Loop):
    name = "broken"

    def train(self, *args):
        raise RuntimeError("no kernel\nfor this")


def test_the_eager_loop_computes_what_fedavg_does():
    # Every client fits into one batch, so the order of its samples does not matter.
    config = Config(
        model="cnn", clients=8, cohort=4, batch_size=256, partition="iid", device="cpu", model_options={"width": 4}
    )
    setting = build(config, data=dataclasses.replace(SMALL, train=400).data())
    eager, method = Eager(setting), methods.create("fedavg")
    progress = RunState.begin(method, setting.w0, 8)
    for _ in range(3):
        accuracy = eager()
        record = run_round(setting, method, Loop(), progress)
    assert record.metrics["test_accuracy"] == pytest.approx(accuracy, abs=0.011)
    own = torch.cat([value.flatten() for value in eager.state.values()])
    torch.testing.assert_close(progress.w, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workload", IMAGES.values(), ids=list(IMAGES))
def test_the_eager_network_is_made_of_plain_layers(workload, monkeypatch):
    small = dataclasses.replace(workload, train=2000, test=200)
    setting = build(small.config(device="cpu", partition="iid"), data=small.data())
    x = torch.randn(2, workload.channels, workload.size, workload.size)
    expected = setting.task.flat(setting.w0, x)
    monkeypatch.setattr("feddpc.models.base.BodyAndHead.forward", None)
    torch.testing.assert_close(Eager(setting).net(x), expected, rtol=1e-4, atol=1e-4)


def test_the_eager_transformer_is_torchs_own():
    data = dataclasses.replace(TEXTS["text-transformer"], train=2, test=2).data()
    options = {"width": 12, "heads": 3, "layers": 2}
    net = models.make_for(data, "transformer", options, 0).double()
    torch_net = plain(net)
    assert any(isinstance(m, torch.nn.TransformerEncoder) for m in torch_net.modules())
    assert sum(p.numel() for p in torch_net.parameters()) == sum(p.numel() for p in net.parameters())
    x = torch.from_numpy(data.x_train)
    torch.testing.assert_close(torch_net.double()(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workload", TEXTS.values(), ids=list(TEXTS))
def test_text_workloads_have_shakespeares_shapes(workload):
    data = dataclasses.replace(workload, train=200, test=10).data()
    assert (data.target, data.classes, data.sample_shape) == ("tokens", 65, (80,))
    assert (data.x_train[:, 1:] == data.y_train[:, :-1]).all()
    config = workload.config()
    assert (config.batch_size, config.cohort, config.clients, config.partition) == (16, 10, 100, "iid")
    assert models.default_name(data) == "transformer"


@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_the_eager_loop_trains_on_tokens_and_leaves_out_ignored_ones(model):
    """One client with one batch is one step of gradient descent on the mean over the tokens that count."""
    config = Config.read({"model": model, "lr": 0.5, "seed": 3, "device": "cpu"})
    options = {"transformer": {"width": 8, "heads": 2}, "lstm": {"hidden": 6}}[model]
    data = dataclasses.replace(TEXTS[f"text-{model}"], size=9, train=4, test=3).data()
    data.y_train[:, 6:] = data.y_test[1:] = -100
    setting = SimpleNamespace(
        config=dataclasses.replace(config, model_options=options, batch_size=16),
        data=data,
        partition=Partition.from_lists([np.arange(4)]),
        sampler=sampling.make("uniform", population=1, cohort=1, seed=0),
    )
    eager = Eager(setting)
    net = models.make_for(data, model, options, 3)
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    kept = y != -100
    torch.nn.functional.cross_entropy(net(x)[kept], y[kept]).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.5 * p.grad
        guesses = net(torch.from_numpy(data.x_test)).argmax(-1)[0]
    assert eager() == pytest.approx((guesses.numpy() == data.y_test[0]).mean())
    torch.testing.assert_close(eager.net(x), net(x), rtol=1e-4, atol=1e-5)


def test_engines_that_cannot_run_are_lines(monkeypatch):
    monkeypatch.setattr(entrants, "ENGINES", {"broken": Broken, "loop": Loop, "refusing": Refusing})
    found = turns.time_rounds(SMALL, device="cpu", rounds=2)
    rows = {r["way"]: r for r in found["rows"]}
    assert rows["refusing"]["error"] == "it is Sunday"
    assert rows["broken"]["error"] == "RuntimeError: no kernel"
    assert found["compared_to"] == "loop, feddpc, float32"
    loop = rows["loop"]
    assert loop["turns"] == 2
    assert loop["speed"] == loop["training_speed"] == 1
    assert loop["round"] > 0 < loop["warm_up"]


def test_nobody_makes_batches_while_the_clock_runs(monkeypatch):
    """Those of the next round are made while this one is computed, whoever had a turn in between."""
    made, plain = [], Planner.plan

    def plan(self, round, ids):
        made.append(round)
        return plain(self, round, ids)

    monkeypatch.setattr(Planner, "plan", plan)
    monkeypatch.setattr(entrants, "ENGINES", {name: lambda: Cuda(anywhere=True) for name in ("one", "two")})
    turns.time_rounds(SMALL, device="cpu", rounds=3)
    runs, rounds = 2 * 2, entrants.WARM_UP + 1 + 3
    assert sorted(made) == sorted([*range(1, rounds + 2)] * runs)  # once each, the one after the last included


def test_every_precision_is_crossed_with_every_engine_when_asked(monkeypatch):
    monkeypatch.setattr(entrants, "ENGINES", {"loop": Loop})
    found = turns.time_rounds(SMALL, device="cpu", rounds=1, wanted=["float32", "float64"], against="eager")
    assert [(r["way"], r["precision"]) for r in found["rows"]] == [
        ("eager", "float32"),
        ("loop", "float32"),
        ("loop", "float64"),
    ]
    assert all(r["turns"] == 1 for r in found["rows"])


def test_nothing_that_can_run_is_still_a_table(monkeypatch):
    monkeypatch.setattr(entrants, "ENGINES", {"broken": Broken})
    (row,) = turns.time_rounds(SMALL, device="cpu")["rows"]
    assert "RuntimeError" in row["error"]


def test_ratios_are_taken_turn_by_turn():
    def entrant(whole, training):
        return local("x", whole=whole, training=training)

    base, own = entrant([2.0, 40.0, 4.0], [1.0, 10.0, 2.0]), entrant([1.0, 10.0], [0.5, 1.0])
    row = own.row(base)
    assert row["speed"] == 3.0  # the median of 2 and 4, though the second turn was slow for both
    assert row["training_speed"] == 6.0
    assert row["round"] == 5.5
    assert row["evaluation"] == pytest.approx(4.75)
    assert row["slowest"] == 10.0


def test_turns_end_when_the_time_is_used_up(monkeypatch):
    monkeypatch.setattr(turns, "LIMIT", 0.0)
    made = [local(n) for n in "ab"]
    for entrant in made:
        entrant.warm()
    turns._take_turns(made, None, lambda _: None)
    assert [len(e.whole) for e in made] == [turns.LEAST] * 2
    turns._take_turns(made, 5, lambda _: None)
    assert [len(e.whole) for e in made] == [turns.LEAST + 5] * 2


@pytest.mark.parametrize("workload", IMAGES.values(), ids=list(IMAGES))
def test_workloads_have_the_shapes_of_their_data_sets(workload):
    small = dataclasses.replace(workload, train=workload.classes, test=workload.classes)
    data = small.data()
    assert sorted(data.y_train) == list(range(workload.classes))
    papers = workload.name != "mnist"
    assert data.sample_shape == ((workload.size, workload.size, 3) if papers else (28, 28, 1))
    config = workload.config()
    assert (config.cohort, config.clients) == (10, 100)
    split = (config.batch_size, config.partition, config.alpha)
    assert split == ((256, Config.partition, 0.6) if papers else (64, "iid", Config.alpha))


def test_the_server_step_is_measured_against_two_reads():
    rows = server_times.time_server_steps(5000, 4)
    assert [r["way"] for r in rows] == ["FedAvg", "FedDPC"]
    assert all(r["over"] > 0 and r["gigabytes_a_second"] > 0 for r in rows)


def test_too_little_memory_for_the_server_step_is_a_line(monkeypatch):
    def full(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(server_times, "ServerWorkload", full)
    assert [r["error"] for r in server_times.time_server_steps()] == ["MemoryError: no room"] * 2


def test_the_commit_is_none_without_git_or_checkout(tmp_path, monkeypatch):
    assert machine.commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit(Path(__file__).parent) is None
    assert machine.describe("cpu")["commit"] is None


def test_the_faster_of_two_plain_loops_is_what_others_are_compared_to(monkeypatch):
    passed, real = [0.0], time.perf_counter
    monkeypatch.setattr("feddpc.bench.clock.time.perf_counter", lambda: real() + passed[0])

    def plain(bench):
        def after(seconds):
            return lambda evaluate: lambda: passed.append(passed.pop() + seconds)

        return [local("eager", name, after(s)) for name, s in (("float32", 300.0), ("tf32", 100.0))]

    monkeypatch.setattr(entrants.Workbench, "eager", plain)
    found = turns.time_rounds(SMALL, device="cpu", rounds=2, engines=["loop"], against="eager")
    assert found["compared_to"] == "eager, fedavg, tf32"
    assert [(r["way"], r["precision"]) for r in found["rows"]][:2] == [("eager", "tf32"), ("eager", "float32")]
    assert found["rows"][0]["speed"] == 1
    assert found["rows"][1]["speed"] < 0.6


def test_the_plain_loop_has_torchs_own_settings(monkeypatch):
    """What ours is asked for, convolutions that sum in one order, may cost time."""
    seen = {}

    def build(way):
        return lambda evaluate: lambda: seen.setdefault(way, torch.backends.cudnn.deterministic)

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    for way in ("loop", "eager"):
        local(way, "float32", build(way)).warm()
    assert seen == {"loop": True, "eager": False}
