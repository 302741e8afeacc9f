"""What methods change before round 1, and what of it a run folder keeps."""

import json

import pytest
import torch
from torch import nn

import feddpc
from feddpc import methods
from feddpc.errors import BadInputError
from feddpc.method_changes import for_method
from feddpc.runs import checkpoint
from feddpc.runs.runner import LEARNED, execute
from support import VARIANTS, blobs, setting_for, small_setting, tiny_net

DATA_SIDE = ["datasharing", "fedbr", "gmm", "faug"]


class Headless(nn.Module):
    """A network with features and no linear layer of its own on top."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.features(x)


def test_a_method_that_changes_nothing_gets_the_very_same_setting():
    setting = small_setting()
    assert for_method(setting, methods.create("scaffold")) is setting


@pytest.mark.parametrize("name", ["moon", "fedbr", "fedalign"])
def test_an_adapted_network_starts_from_the_shared_weights(name):
    plain, own = small_setting(), setting_for(methods.create(name))
    shared = plain.task.flat.state_dict(plain.w0)
    mine = own.task.flat.state_dict(own.w0)
    kept = [k for k in shared if any(m.endswith(k) and torch.equal(mine[m], shared[k]) for m in mine)]
    body = [k for k in shared if k.startswith("body")]
    assert set(body) <= set(kept)
    again = setting_for(methods.create(name))
    assert torch.equal(own.w0, again.w0)
    assert plain.task.d == small_setting().task.d  # the shared network itself was left alone


@pytest.mark.parametrize("name", DATA_SIDE)
def test_the_test_set_and_the_others_data_stay_as_they_are(name):
    method = VARIANTS[name]
    own = setting_for(method)
    plain = small_setting(reserve=method.reserve)
    assert torch.equal(own.task.x_test, plain.task.x_test)
    n = len(plain.task.x)
    assert torch.equal(own.task.x[:n], plain.task.x)
    assert torch.equal(own.task.y[:n], plain.task.y)
    for before, after in zip(plain.partition, own.planner.partition, strict=True):
        assert after[: len(before)].tolist() == before.tolist()


@pytest.mark.parametrize("name", DATA_SIDE)
def test_what_left_the_clients_is_written_down(name, tmp_path):
    method = VARIANTS[name]
    execute(small_setting(reserve=method.reserve, rounds=1, engine="loop"), method=method, out=tmp_path / "r")
    told = json.loads((tmp_path / "r" / "privacy.json").read_text())
    assert told["note"] == method.privacy
    assert told["disclosed"]
    assert "Nothing but" not in told["note"]


@pytest.mark.parametrize("name", ["fedbr", "gmm", "faug"])
def test_a_resumed_run_reads_what_was_learned(name, tmp_path, monkeypatch):
    method = VARIANTS[name]
    setting = small_setting(rounds=2, engine="loop")
    execute(setting, method=method, out=tmp_path / "r")
    stored = checkpoint.load_model(tmp_path / "r" / LEARNED)

    def never(self, world):
        raise AssertionError("learned again")

    monkeypatch.setattr(type(method), "learn", never)
    more = small_setting(rounds=4, engine="loop")
    outcome = execute(more, method=method, out=tmp_path / "r", resume=True)
    assert outcome.summary["rounds"] == 4
    assert all(torch.equal(outcome.experiment.learned[k], v) for k, v in stored.items())


def test_costs_are_in_the_summary_and_survive_a_resume(tmp_path):
    method = methods.create("fedspeed")
    whole = execute(small_setting(rounds=4, engine="loop"), method=method, out=tmp_path / "whole")
    execute(small_setting(rounds=2, engine="loop"), method=method, out=tmp_path / "cut")
    again = execute(small_setting(rounds=4, engine="loop"), method=method, out=tmp_path / "cut", resume=True)
    assert whole.summary["costs"] == again.summary["costs"]
    assert whole.summary["costs"]["gradients"] == 2


@pytest.mark.parametrize(
    ("method", "part"), [("moon", "features"), ("fedbr", "features"), ("fedalign", "trunk"), ("moon", "head")]
)
def test_a_model_without_the_part_is_refused_by_name(method, part):
    model = Headless() if part == "head" else nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    title = methods.get(method).title
    with pytest.raises(BadInputError, match=f"{title} needs {part}, but this model defines none"):
        feddpc.simulate(model=model, data=blobs(), method=method, rounds=1, clients=4, cohort=2)


def test_simulate_gives_back_the_adapted_network():
    result = feddpc.simulate(data=blobs(), model=tiny_net(), method="moon", rounds=1, clients=4, cohort=2)
    assert any("projection" in name for name in result.state_dict)


@pytest.mark.parametrize("name", ["moon", "fedbr"])
def test_new_layers_are_not_copies_of_the_networks_first(name):
    from feddpc.build import build
    from feddpc.config import Config

    setting = build(Config(model="mlp", clients=4, cohort=2, device="cpu"))
    own = for_method(setting, methods.create(name))
    mine = own.task.flat.state_dict(own.w0)
    first = mine["base.body.1.weight"]
    new = mine["projection.0.weight" if name == "moon" else "projector.0.weight"][: len(first)]
    assert first.shape == new.shape
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), new.flatten()]))[0, 1])) < 0.1
