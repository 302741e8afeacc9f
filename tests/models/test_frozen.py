"""Parameters with ``requires_grad=False`` are constants of the network: nobody trains, moves or sends them."""

import pytest
import torch
from torch import nn

import feddpc
from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import RunFolderError
from support import run_rounds

SMALL = {"data": "digits", "clients": 12, "cohort": 4, "rounds": 2, "batch_size": 16}
BASE = ("1.weight", "1.bias", "3.bias")


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in BASE)
    return net


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"method": "scaffold"}, {"client_optimizer": "adamw"}, {"method": "fedadam"}])
def test_frozen_parameters_stay_bit_identical(engine, settings):
    before, net = network().state_dict(), network()
    result = feddpc.simulate(model=net, engine=engine, **SMALL, **settings)
    for name, value in result.state_dict.items():
        assert torch.equal(value, before[name]) == (name in BASE), name
        assert torch.equal(result.model.state_dict()[name], value)


def test_only_trained_parameters_are_sent_and_remembered():
    setting = build(Config.read(SMALL), module=network())
    state, _ = run_rounds(setting, methods.create("scaffold"), Loop(), 2)
    trained = 12 * 10  # the last layer's weights
    assert setting.task.d == state.w.numel() == trained
    assert state.meter.up == 2 * trained * state.meter.clients  # SCAFFOLD sends two vectors
    assert state.clients.width == trained


def test_other_frozen_parameters_are_another_model(tmp_path):
    """Only the folder's fingerprint can tell: the trained parameters are the same."""
    feddpc.simulate(model=network(), out=tmp_path, **SMALL)
    feddpc.simulate(model=network(), out=tmp_path, resume=True, **SMALL | {"rounds": 3})
    other = network()
    with torch.no_grad():
        other[3].bias += 1
    with pytest.raises(RunFolderError, match="initial model"):
        feddpc.simulate(model=other, out=tmp_path, resume=True, **SMALL | {"rounds": 4})
