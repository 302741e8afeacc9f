"""Which engine runs an experiment: a rule, not a clock; and code of the user's own is compared with the loop first."""

import contextlib
import dataclasses
import json
import time
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import feddpc
from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.methods.base import Method
from feddpc.runs import engine_choice
from feddpc.runs.engine_choice import choose_engine, rule
from feddpc.study.compare import Overrides, compare
from support import DEVICE, blobs, small_setting

FEDAVG = methods.create("fedavg")
SMALL = {"clients": 100, "cohort": 10, "rounds": 3, "device": DEVICE}
#: What auto takes for small models, and another engine that pads.
AUTO = "stacked" if DEVICE == "cpu" else "cuda"


def simulate(**values):
    return feddpc.simulate(**{**SMALL, "client_lr": 0.1, "method": "fedavg", **values})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainMean(Method):
    """FedAvg whose loss is averaged over all rows of a batch, padding included."""

    name = "plainmean"

    def objective(self, task, y, batch, ctx):
        return F.cross_entropy(task.part(y, "forward", batch.x), batch.y)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedMean(Method):
    """The same with the mean that leaves padding out."""

    name = "maskedmean"

    def objective(self, task, y, batch, ctx):
        return batch.mean(F.cross_entropy(task.part(y, "forward", batch.x), batch.y, reduction="none"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches(Method):
    """Clips long gradients with a branch on a tensor."""

    name = "branches"

    def correct(self, g, y, ctx):
        return g / g.norm() if g.norm() > 1.0 else g


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


class LooksAtValues(Net):
    def forward(self, x):
        return super().forward(torch.zeros_like(x) if x.isnan().any() else x)


class WritesIntoZeros(Net):
    def forward(self, x):
        padded = torch.zeros(len(x), 64, device=x.device)
        padded[:, :] = x.flatten(1)
        return self.head(padded)


class MixesSamples(Net):
    """Normalizes over the batch, without buffers: a padded row changes the others."""

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x - x.mean(0))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        lengths = torch.full((len(x),), 8)
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(-1, 8, 8), lengths, batch_first=True)
        return self.head(self.rows(packed)[1][0][-1])


def test_a_loss_that_counts_padding_is_trained_in_the_loop():
    """FedAvg written with a plain mean must be FedAvg, whatever the engine."""
    with pytest.warns(UserWarning, match="'loop'") as told:
        result = simulate(method=PlainMean())
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert result.config.engine == "loop"
    reference = simulate(method="fedavg", engine="loop")
    assert np.array_equal(result.test_loss, reference.test_loss)
    with pytest.raises(BadInputError, match=r"engine 'stacked'.*batch\.mean"):
        simulate(method=PlainMean(), engine="stacked")


def test_a_loss_that_leaves_padding_out_is_stacked_without_a_word():
    result = simulate(method=MaskedMean())
    assert result.config.engine == AUTO
    reference = simulate(method="fedavg", engine="loop")
    assert result.test_loss == pytest.approx(reference.test_loss, abs=1e-5)


@pytest.mark.parametrize("module", [LooksAtValues, WritesIntoZeros, MixesSamples])
def test_models_that_cannot_be_stacked_are_trained_in_the_loop(module):
    torch.manual_seed(0)
    net = module()
    with pytest.warns(UserWarning, match="'loop'"):
        result = simulate(model=net)
    assert np.array_equal(result.test_loss, simulate(model=net, engine="loop").test_loss)
    with pytest.raises(BadInputError, match="engine 'stacked'"):
        simulate(model=net, engine="stacked")


def test_recurrent_layers_are_not_stacked():
    torch.manual_seed(0)
    net = Packed()
    silent = contextlib.nullcontext() if DEVICE == "cpu" else pytest.warns(UserWarning, match="'loop'")
    with silent:
        result = simulate(model=net)
    assert result.config.engine == ("threads" if DEVICE == "cpu" else "loop")
    assert result.test_loss == pytest.approx(simulate(model=net, engine="loop").test_loss, abs=1e-5)
    with pytest.raises(BadInputError, match="engine 'stacked'"):
        simulate(model=net, engine="stacked")


def test_a_method_that_branches_on_a_tensor_is_trained_in_the_loop():
    with pytest.warns(UserWarning, match="'loop'"):
        result = simulate(method=Branches())
    assert np.array_equal(result.test_loss, simulate(method=Branches(), engine="loop").test_loss)


def test_a_model_that_can_be_stacked_is():
    assert simulate(model=Net()).config.engine == AUTO


def test_a_mistake_in_a_model_is_told_as_it_is():
    class Broken(Net):
        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                raise ZeroDivisionError("mine")
            return super().forward(x)

    with pytest.warns(UserWarning, match="fails in 'loop' too"), pytest.raises(ZeroDivisionError, match="mine"):
        simulate(model=Broken())


@pytest.mark.parametrize("name", [n for n in methods.names() if n not in ("moon", "fedalign", "fedbr", "faug", "gmm")])
def test_own_models_pass_with_every_method(name):
    """Populations, clusters, surveys and probes of the real experiment fit the small one."""
    hyper = {"clusters": 20} if name == "clusterfedvarp" else {}
    result = simulate(model=Net(), method=name, hyper=hyper, rounds=1)
    assert result.config.engine == AUTO


@pytest.mark.parametrize("policy", [{"rule": "median"}, {"faults": {"nan": 0.2}}, {"screen": {"norm": 3.0}}])
def test_policies_of_the_server_do_not_disturb_the_comparison(policy):
    assert simulate(model=Net(), **policy).config.engine == AUTO


def test_one_comparison_per_code_and_shapes(monkeypatch):
    compared = []
    plain = engine_choice._compare
    monkeypatch.setattr(engine_choice, "_compared", {})
    monkeypatch.setattr(engine_choice, "_compare", lambda *args: compared.append(1) or plain(*args))
    for seed in (0, 1):
        simulate(model=Net(), seed=seed, client_lr=0.1 + seed)
    assert len(compared) == 1
    simulate(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    simulate(model=Net(), method=MaskedMean())
    assert len(compared) == 3
    simulate()
    assert len(compared) == 3


def test_the_comparison_takes_less_than_a_second(monkeypatch):
    monkeypatch.setattr(engine_choice, "_compared", {})
    setting = build(Config.read({"device": DEVICE}), module=Net())
    began = time.process_time()
    assert choose_engine("auto", setting, FEDAVG).name == AUTO
    assert time.process_time() - began < (1 if DEVICE == "cpu" else 5)  # there, with the first use of libraries


# The rule of auto


def test_auto_never_looks_at_the_clock_or_the_number_of_rounds(monkeypatch):
    chosen = {choose_engine("auto", small_setting(rounds=n), FEDAVG).name for n in (1, 6, 10**6)}
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"cohort": 5}, "stacked"),
        ({"cohort": 2}, "threads"),
        ({"cohort": 1}, "loop"),
        ({"cohort": 5, "batch_size": 90, "model_options": {"hidden": [512]}}, "threads"),
    ],
)
def test_the_rule_on_a_cpu(values, name):
    setting = build(Config.read({"clients": 8, "device": "cpu", "model": "mlp", **values}), data=blobs())
    assert rule(setting) == name
    assert choose_engine("auto", setting, FEDAVG).name == name


def test_a_resumed_run_keeps_its_engine(tmp_path):
    simulate(out=tmp_path / "run", engine="loop", rounds=2)
    assert simulate(out=tmp_path / "run", resume=True, rounds=4).config.engine == "loop"
    first = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    whole = simulate(engine="loop", rounds=4).records
    assert [r["test_loss"] for r in first] == [r["test_loss"] for r in whole]


def test_a_comparison_falls_back_for_the_method_that_needs_it(tmp_path):
    """The engine of one method is not forced on another."""
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "import torch.nn.functional as F\n"
        "from feddpc.methods import Method\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class PlainMean(Method):\n"
        "    def objective(self, task, y, batch, ctx):\n"
        "        return F.cross_entropy(task.part(y, 'forward', batch.x), batch.y)\n"
    )
    overrides = Overrides({**SMALL, "threads": 1})
    with pytest.warns(UserWarning, match="'loop'"):
        outcomes = compare(overrides, ["fedavg", f"{file}:PlainMean"], [0], tmp_path / "out")
    assert [outcome.config.engine for outcome in outcomes] == [AUTO, "loop"]
    one, other = ([r["test_loss"] for r in outcome.records] for outcome in outcomes)
    assert one == pytest.approx(other, abs=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float32Memory(Method):
    """Its memory has torch's default type, whatever the model's is."""

    name = "float32memory"

    def init_client(self, w):
        return {"c": torch.zeros(w.shape, device=w.device)}

    def finish(self, y, ctx):
        return {"delta": ctx.w - y}, {"c": ctx.state["c"] + (ctx.w - y)}


def test_code_that_only_works_in_the_precision_of_the_run_is_compared_in_that():
    assert simulate(method=Float32Memory()).config.engine == AUTO


def branching(x, uniforms):
    return 2 * x if x.sum() > 0 else x


def test_a_transform_that_branches_on_a_tensor_is_trained_in_the_loop():
    with pytest.warns(UserWarning, match="loop"):
        assert simulate(transform=branching).config.engine == "loop"
    with pytest.raises(BadInputError, match=AUTO):
        simulate(transform=branching, engine=AUTO)


def test_a_transform_that_can_be_stacked_is():
    assert simulate(transform=lambda x, uniforms: x + uniforms[:, :1, None, None]).config.engine == AUTO


@pytest.mark.parametrize("uniforms", ["x", -1, 1.5])
def test_how_many_random_numbers_a_transform_wants_is_a_whole_number(uniforms):
    def same(x, uniforms):
        return x

    same.uniforms = uniforms
    with pytest.raises(BadInputError, match="uniforms"):
        simulate(transform=same)


def test_clients_are_not_evaluated_in_the_comparison_with_the_loop():
    # Its clients have one sample, on which BatchNorm cannot be tuned.
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    more = {"clients": 10, "cohort": 3, "evaluate_clients": True, "finetune_steps": 2, "device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = simulate(model=module, partition="iid", **more)
    assert result.config.engine == "threads"
