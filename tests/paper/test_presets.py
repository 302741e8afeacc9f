"""Presets are complete: nothing is left for a run to fill in, and what the paper says is what they hold."""

import dataclasses
import tomllib

import numpy as np
import pytest
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.specs import spec
from feddpc.errors import BadInputError
from feddpc.paper import presets
from feddpc.resolve import resolve


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("scale", ["paper", "small", "tiny"])
def test_a_run_has_nothing_to_fill_in(name, scale):
    """But where to run: ``auto`` for device, engine and threads decides nothing about the numbers."""
    known = spec(name)
    x = np.zeros((2000, *known.shape), np.uint8)
    y = np.arange(2000) % known.classes
    data = Dataset.from_arrays(x, y, x[:10], y[:10], name=name, classes=known.classes)
    config = presets.preset(name, scale=scale, device="cpu")
    assert resolve(config, data) == config


@pytest.mark.parametrize(("name", "rounds"), [("cifar10", 400), ("cifar100", 800), ("tiny-imagenet", 800)])
def test_the_papers_settings(name, rounds):
    config = presets.preset(name)
    facts = {"clients": 100, "cohort": 10, "batch_size": 256, "epochs": 1, "rounds": rounds, "seed": 0, "data": name}
    facts |= {"partition": "dirichlet", "participation": "uniform", "weighting": "uniform", "lr_decay": 1.0}
    facts |= {"augment": False, "precision": "float32", "scaling": "half"}
    assert {key: getattr(config, key) for key in facts} == facts
    assert config.hyper["lam"] == 1.0
    assert config.hyper["max_scale"] == 0.0  # the paper's algorithm, to the letter
    assert config.model == ("lenet5" if name == "cifar10" else "resnet18")
    assert config.model_options.get("init") == (None if name == "cifar10" else "torch")


def test_changes_reach_everything_that_follows_from_them():
    config = presets.preset("cifar100", "fedcm", alpha=0.6, lr=0.01, seed=3, hyper={"alpha": 0.5})
    assert (config.alpha, config.partition_options["alpha"]) == (0.6, 0.6)
    assert (config.lr, config.server_lr) == (0.01, 0.01)
    assert (config.seed, config.hyper) == (3, {"alpha": 0.5})
    assert presets.preset("cifar10", "fedavg", lr=0.1, server_lr=0.2).server_lr == 0.2


def test_a_shortened_version_says_what_is_cut():
    for name in presets.PRESETS:
        whole = presets.preset(name, scale="paper")
        for scale in presets.scales(name).values():
            config = presets.preset(name, scale=scale.name)
            same = dataclasses.replace(config, rounds=whole.rounds) == whole
            assert bool(scale.short) == (config.rounds < whole.rounds)
            assert same or "clients" in scale.short
            assert not scale.short or scale.short.startswith(f"{config.rounds} of the paper's {whole.rounds} rounds")


def test_unknown_names_are_refused():
    with pytest.raises(BadInputError, match="unknown scale 'smal': did you mean 'small'"):
        presets.preset("digits", scale="smal")
    with pytest.raises(BadInputError, match="unknown preset 'cifar'"):
        presets.preset("cifar")
    with pytest.raises(BadInputError, match="unknown hyper-parameter of fedprox 'lam'"):
        presets.preset("digits", "fedprox", hyper={"lam": 1.0})


def test_the_command_prints_what_a_run_can_read():
    printed = CliRunner().invoke(app, ["presets", "tiny-imagenet", "--method", "fedprox", "--alpha", "0.6"]).stdout
    assert Config.read(tomllib.loads(printed)) == presets.preset("tiny-imagenet", "fedprox", alpha=0.6)
    listed = CliRunner().invoke(app, ["presets"]).stdout
    assert all(name in listed for name in presets.PRESETS)
    assert "40 of the paper's 400 rounds" in listed
