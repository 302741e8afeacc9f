"""The same seeds give the same model in the simulator and over Flower: bit by bit, for every method."""

import pytest
import torch

from feddpc import flower
from feddpc.engines.loop import Loop
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from support import HARD, VARIANTS, setting_for, small_setting

ROUNDS = 3  # of four clients out of eight, so that some come again
ALL = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())


def federated(setting, method, rounds=ROUNDS, **more):
    halves = flower.app_arguments(setting)
    grid = flower.InProcessGrid(flower.client_app(**halves.client()), len(setting.population))
    strategy = flower.strategy(method, **halves.server(), **more)
    result = strategy.start(grid, strategy.initial_arrays(), num_rounds=rounds)
    return strategy, result


#: A budget: clients come by coins, updates are cut, the sum is noised, also when nobody came.
PRIVATE = {"participation": "poisson", "cohort": 1, "privacy": {"clip": 0.1, "noise": 0.5, "delta": 0.01}}


@pytest.mark.parametrize("name", ["feddpc", "feddpc streaming", "fedavg"])
def test_privacy_is_the_same_over_flower(name):
    test_the_simulator_and_the_grid_agree_bit_by_bit(VARIANTS[name], PRIVATE)


@pytest.mark.parametrize("name", ["feddpc", "fednova", "fedga"])
def test_optimizers_are_the_same_over_flower(name):
    """The client's at the nodes, the server's and the schedule at the server."""
    client = {"name": "adamw", "weight_decay": 0.1} if name == "feddpc" else {"name": "sgd", "momentum": 0.9}
    how = {"client_optimizer": client, "clip_norm": 1.0, "server_optimizer": "yogi", "lr_schedule": "cosine"}
    test_the_simulator_and_the_grid_agree_bit_by_bit(VARIANTS[name], how)


def test_noise_and_participants_are_no_secret_of_the_experiments_seed():
    """Clients know that seed, so a federation draws both from elsewhere unless asked not to."""
    ends = [federated(small_setting(**PRIVATE), VARIANTS["fedavg"], 1)[0].now.w for _ in range(2)]
    assert not torch.equal(*ends)


@ALL
@pytest.mark.parametrize("how", [{}, HARD], ids=["plain", "all"])
def test_the_simulator_and_the_grid_agree_bit_by_bit(method, how):
    setting = setting_for(method, **how)
    progress = RunState.begin(method, setting.w0, len(setting.population), optimizer=setting.policies.optimizer)
    records = [run_round(setting, method, Loop(), progress) for _ in range(ROUNDS)]
    strategy, _ = federated(small_setting(reserve=method.reserve, **how), method, reproducible=True)
    assert strategy.refusals == []
    assert torch.equal(strategy.now.w, progress.w)
    for key, value in progress.server.items():
        assert torch.equal(strategy.now.server[key], value)
    for one, other in zip(records, strategy.records, strict=True):
        assert (one.participants, one.dropped, one.rejected) == (other.participants, other.dropped, other.rejected)
        assert one.metrics == other.metrics
        assert one.train_loss == pytest.approx(other.train_loss, abs=0, nan_ok=True)
        assert one.notes == {k: v for k, v in other.notes.items() if k != "refused"}
