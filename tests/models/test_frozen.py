"""Parameters with ``requires_grad=False`` are constants of the network: nobody trains, moves or sends them."""

import copy

import pytest
import torch
from torch import nn

import feddpc
from feddpc.errors import RunFolderError
from feddpc.runs.checkpoint import read_json

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
