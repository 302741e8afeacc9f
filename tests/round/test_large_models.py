"""Large models: copies are saved, and the numbers are the same."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.distributed import Distributed
from feddpc.engines.loop import Loop
from feddpc.methods import _algebra
from feddpc.methods import base as methods_base
from feddpc.models.flat import Flat
from feddpc.ranks import ALONE
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.tasks import base as tasks_base
from feddpc.tasks import network as network_task
from support import VARIANTS, blobs, enough_rounds, run_by_the_loop, run_rounds, setting_for


@pytest.fixture
def all_models_are_large(monkeypatch):
    monkeypatch.setattr(tasks_base, "LARGE", 1)
    monkeypatch.setattr(methods_base, "LARGE", 1)
    monkeypatch.setattr(network_task, "LARGE", 1)


@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_method_computes_the_same_bits(method, all_models_are_large, monkeypatch):
    b, right = run_rounds(setting_for(method), method, Loop(), enough_rounds(method))
    monkeypatch.undo()
    a, left = run_by_the_loop(method, {}, enough_rounds(method))
    assert torch.equal(a.w, b.w)
    for one, other in zip(left, right, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, abs=0, rel=0, nan_ok=True)


def test_gradients_of_a_parameter_in_two_places_are_added_up(all_models_are_large):
    layer = nn.Linear(3, 3)
    flat = Flat(nn.Sequential(layer, nn.Tanh(), layer))
    y, x = flat.vector(), torch.arange(6.0).view(2, 3)

    def objective(at):
        return (flat(at, x) * flat(at, x + 1)).sum() + at.square().sum()

    _, gradient = tasks_base.by_autograd(objective, y)
    (expected,) = torch.autograd.grad(objective(leaf := y.clone().requires_grad_()), leaf)
    torch.testing.assert_close(gradient, expected)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and remembers the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.live:
                storage = x.untyped_storage()
                self.live[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
                self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key):
        self.now -= self.live.pop(key)


def network():
    torch.manual_seed(0)
    hidden = [part for _ in range(8) for part in (nn.Linear(300, 300), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 300), nn.ReLU(), *hidden, nn.Linear(300, 3))


@pytest.mark.parametrize("name", ["feddpc", "fedavg"])
def test_a_rank_has_at_most_six_copies_of_a_large_model(name, all_models_are_large, monkeypatch):
    monkeypatch.setattr(_algebra, "CACHED", 1 << 14)  # pieces that are small where a model is large
    method = methods.create(name)
    values = {"method": name, "clients": 20, "cohort": 10, "batch_size": 2, "epochs": 1, "partition": "iid"}
    with LiveBytes() as memory:
        experiment = build(Config.read(values | {"device": "cpu"}), data=blobs(), module=network())
        state = RunState.of(experiment, method, own=True)
        engine = Distributed(Loop(), ALONE, at_once=1)
        for _ in range(3):
            run_round(experiment, method, engine, state)
    assert 4 <= memory.peak / state.w.nbytes <= 6


def test_a_run_that_owns_the_experiment_overwrites_its_first_model():
    method = VARIANTS["feddc clients"]  # in float64, its server remembers the first model
    experiment, other = setting_for(method), setting_for(method)
    own = RunState.of(experiment, method, own=True)
    assert own.w is experiment.w0
    state = RunState.of(other, method)
    for _ in range(3):
        run_round(experiment, method, Loop(), own)
        run_round(other, method, Loop(), state)
    assert torch.equal(own.w, state.w)
    assert not torch.equal(own.w, other.w0)
    assert torch.equal(other.w0, setting_for(method).w0)
