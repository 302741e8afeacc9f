"""Small federations and problems that many tests share."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.engines.base import Engine
from feddpc.engines.loop import Loop
from feddpc.experiment import Experiment
from feddpc.method_changes import for_method
from feddpc.methods.base import DATA_HOOKS, Method, overrides
from feddpc.models.base import BodyAndHead
from feddpc.round.round import RoundRecord, run_round
from feddpc.round.state import RunState

# methods.md 7.2, problem Q4
Q4 = {
    "curvature": [[1, 2, 4], [2, 1, 1], [3, 1, 2], [1, 3, 1]],
    "centre": [[1, 0, -1], [0, 1, 2], [-1, 2, 0], [2, -1, 1]],
    "w0": [0.5, -0.5, 1.0],
    "schedule": [[0, 1], [2, 3], [0, 2], [1, 3]],
    "client_lr": 0.1,
    "server_lr": 0.1,
    "steps": 3,
}

#: One instance of every registered method and of each variant that takes another way through the code.
VARIANTS: dict[str, Method] = {name: methods.create(name) for name in methods.names()} | {
    "clusterfedvarp": methods.create("clusterfedvarp", clusters=3),
    "feddpc streaming": methods.create("feddpc", form="streaming"),
    "feddpc client": methods.create("feddpc", form="client"),
    "feddpc no scaling": methods.create("feddpc", scaling=False),
    "feddpc neither": methods.create("feddpc", scaling=False, projection=False),
    "feddpc by steps": methods.create("feddpc", normalize_by_steps=True),
    "feddpc client by steps": methods.create("feddpc", normalize_by_steps=True, form="client"),
    "feddpc exclude": methods.create("feddpc", guard="exclude", tau=0.9),
    "feddpc soft": methods.create("feddpc", guard="soft", tau=0.1),
    "feddpc keep": methods.create("feddpc", guard="keep", tau=0.9),
    "feddpc momentum": methods.create("feddpc", momentum=0.5),
    "feddpc client momentum": methods.create("feddpc", momentum=0.5, lam=0.0, form="client"),
    "fedexp pair": methods.create("fedexp", evaluate="pair"),
    "fedexp code": methods.create("fedexp", eps_times_m=True),
    "fedalign": methods.create("fedalign", mu=0.1),  # without clipping, large weights are chaotic near L = 0
    "fedalign half": methods.create("fedalign", mu=0.01, omega=0.5),
    "fedbr mixture": methods.create("fedbr", mixture=True, pseudo=5),
    "moon sharp": methods.create("moon", mu=5.0, tau=0.1, width=8),
    "faug": methods.create("faug", gan_steps=3, seeds=2),
    "fedga fresh": methods.create("fedga", variant="fresh"),
    "scaffold I": methods.create("scaffold", option="I"),
    "scaffold warm": methods.create("scaffold", warm=True),
    "feddyn clients": methods.create("feddyn", evaluate="clients"),
    "fedspeed paper": methods.create("fedspeed", server="paper"),
    "fedspeed mixed": methods.create("fedspeed", alpha=0.3),
    "fedamd sequential": methods.create("fedamd", anchors="sequential", every=2),
    "feddc paper": methods.create("feddc", form="paper", evaluate="clients"),
    "feddc clients": methods.create("feddc", evaluate="clients"),
    "mifa wait": methods.create("mifa", table="wait"),
    "datasharing cold": methods.create("datasharing", warmup=0),
}


#: The battery can be run on an accelerator too: FEDDPC_TEST_DEVICE=cuda pytest tests/methods/test_contract.py
DEVICE = os.environ.get("FEDDPC_TEST_DEVICE", "cpu")


def blobs(n: int = 90, classes: int = 3, size: int = 6, seed: int = 0) -> Dataset:
    """Grey images whose mean brightness in one corner tells the class."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(classes, size=count)
        x = rng.integers(0, 80, size=(count, size, size, 1))
        for i, label in enumerate(y):
            x[i, label : label + 3, label : label + 3] += 150
        return x.astype(np.uint8), y

    return Dataset.from_arrays(*draw(n), *draw(n // 2), classes=classes, name="blobs")


def uneven(n: int, sizes: tuple[int, ...] = (3, 9, 1, 6, 13, 2, 5, 7)) -> Partition:
    """Clients of very unequal sizes: at four samples a batch, one to four steps, most with a partial last batch."""
    order = np.random.default_rng(1).permutation(n)[: sum(sizes)]
    return Partition.from_sizes(order, np.array(sizes))


class TinyNet(BodyAndHead):
    """A network with a convolution, a GroupNorm and a linear layer, and all the parts that methods ask for."""

    stage = slice(0, 3)

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(72, classes)


def tiny_net(seed: int = 0, classes: int = 3) -> nn.Module:
    """A TinyNet with weights from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet(classes)


def on_quadratics(method: Method) -> bool:
    """Whether a method can run without a network and samples."""
    return not any(overrides(method, hook) for hook in DATA_HOOKS)


def setting_for(method: Method, **values: Any) -> Experiment:
    """The small federation as ``method`` changes it before round 1."""
    return for_method(small_setting(reserve=method.reserve, **values), method)


def small_setting(**values: Any) -> Experiment:
    """A federation of eight uneven clients, four a round, in float64."""
    data = blobs()
    config = Config.read(
        {
            "cohort": 4,
            "clients": 8,
            "batch_size": 4,
            "epochs": 2,
            "precision": "float64",
            "rounds": 6,
            "lr": 0.05,
            "device": DEVICE,
            **values,
        }
    )
    return build(config, data=data, module=tiny_net(), partition=uneven(90))


def run_rounds(setting: Experiment, method: Method, engine: Engine, rounds: int) -> tuple[RunState, list[RoundRecord]]:
    """Run some rounds and return where they led."""
    progress = RunState.begin(method, setting.w0, len(setting.population), optimizer=setting.policies.optimizer)
    return progress, [run_round(setting, method, engine, progress) for _ in range(rounds)]


def same_memories(a: RunState, b: RunState, atol: float = 1e-10) -> None:
    """Assert that two runs remember the same clients, and the same of each."""
    for mine, theirs in ((a.slots, b.slots), (a.clients, b.clients)):
        (ids, table), (other_ids, other_table) = mine.export(), theirs.export()
        assert ids.tolist() == other_ids.tolist()
        for key, value in table.items():
            torch.testing.assert_close(other_table[key], value, rtol=0, atol=atol, equal_nan=atol == 0.0)


_BY_THE_LOOP: dict[tuple[object, ...], tuple[RunState, list[RoundRecord]]] = {}


def run_by_the_loop(method: Method, how: dict[str, Any], rounds: int) -> tuple[RunState, list[RoundRecord]]:
    """Run the reference engine on the small federation; what others are compared with is computed once, to be read."""
    key = (type(method), repr(method), repr(sorted(how.items())), rounds)
    if key not in _BY_THE_LOOP:
        _BY_THE_LOOP[key] = run_rounds(setting_for(method, **how), method, Loop(), rounds)
    return _BY_THE_LOOP[key]


#: Everything that makes a round more than the plain one.
HARD = {"weighting": "samples", "dropout": 0.3, "augment": True, "lr_decay": 0.9}


#: Rounds until a method's model first moves, where that is not the first.
SLOW_STARTERS = {"fedamd sequential": 2, "mifa wait": 6}


def enough_rounds(method: Method) -> int:
    """In three rounds of four clients out of eight some come again; one more uses what they then left behind."""
    return SLOW_STARTERS["mifa wait"] if method == VARIANTS["mifa wait"] else 4


def compare_with_loop(method, engine, how, rounds=None):
    """Run a method through ``engine`` and the reference, and compare all that there is."""
    rounds = rounds or enough_rounds(method)
    a, left = run_by_the_loop(method, how, rounds)
    b, right = run_rounds(setting_for(method, **how), method, engine, rounds)
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    for key, value in a.server.items():
        torch.testing.assert_close(b.server[key], value, rtol=0, atol=1e-10)
    for one, other in zip(left, right, strict=True):
        assert (one.participants, one.dropped, one.rejected) == (other.participants, other.dropped, other.rejected)
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-10, nan_ok=True)
        assert one.metrics == pytest.approx(other.metrics, abs=1e-9)
        assert one.metrics["test_accuracy"] == other.metrics["test_accuracy"]
        assert one.notes == pytest.approx(other.notes, abs=1e-8)
    same_memories(a, b)
    assert a.meter == b.meter
    assert engine.void == 0
