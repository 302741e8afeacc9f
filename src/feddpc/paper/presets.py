"""The paper's settings as complete configurations, and shorter versions that say what they leave out.

What the paper leaves open is settled here, once: both rates are equal; LeNet5 is variant A; ResNet18 has the 7x7 stem,
GroupNorm with 2 groups, and convolutions that start as torch's own; images are scaled to [-1, 1] by
(x / 255 - 0.5) / 0.5; nothing is augmented. Start and scaling are those with which FedDPC and FedAvg came near the
paper's accuracies; torchvision's start and other scalings did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feddpc import methods
from feddpc.config import Config
from feddpc.errors import unknown

#: Section "Implementation Details": 10 of 100 clients, one local epoch, plain SGD, uniform weights, nothing else.
PAPER: Mapping[str, Any] = {
    "clients": 100,
    "cohort": 10,
    "task": "classification",
    "buffers": "average",
    "loss": "cross-entropy",
    "metrics": "accuracy",
    "partition": "dirichlet",
    "participation": "uniform",
    "dropout": 0.0,
    "weighting": "uniform",
    "lr": 0.1,
    "lr_decay": 1.0,
    "batch_size": 256,
    "epochs": 1,
    "reserve": 0.0,
    "scaling": "half",
    "augment": False,
    "precision": "float32",
    "threads": "auto",
    "partition_options": {"min_size": 10},
}


_RESNET = {"model": "resnet18", "model_options": {"stem": "7x7", "groups": 2, "init": "torch"}, "rounds": 800}
#: What sets each data set apart. Clients of digits have 14 samples on average: batches of 8 make two steps, as there.
_DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"model": "lenet5", "model_options": {"variant": "A"}, "rounds": 400},
    "cifar100": _RESNET,
    "tiny-imagenet": _RESNET,
    "digits": {"model": "cnn", "model_options": {"width": 16}, "rounds": 400, "batch_size": 8}
    | {"partition_options": {"min_size": 1}, "device": "cpu", "engine": "loop", "threads": 1},
}
#: The presets, with a description.
PRESETS = {
    "cifar10": "CIFAR-10, LeNet5, 400 rounds",
    "cifar100": "CIFAR-100, ResNet18 with GroupNorm, 800 rounds",
    "tiny-imagenet": "Tiny ImageNet, ResNet18 with GroupNorm, 800 rounds",
    "digits": "Digits in place of CIFAR-10, a small CNN: not in the paper, but on every machine, and quick on two "
    "cores",
}


@dataclass(frozen=True)
class Scale:
    """How much of an experiment is run; ``short`` is empty for the whole and otherwise says what was cut."""

    name: str
    values: Mapping[str, Any]
    short: str = ""


def scales(data: str) -> dict[str, Scale]:
    """Return the scales of a data set by name: ``paper`` first, then shorter ones."""
    if data not in PRESETS:
        raise unknown("preset", data, PRESETS)
    whole = int(_DATA[data]["rounds"])
    tiny = {"rounds": 6, "clients": 20, "cohort": 4, "model": "mlp", "model_options": {"hidden": [16]}}
    small = 60 if data == "digits" else whole // 10
    return {
        "paper": Scale("paper", {}),
        "small": Scale("small", {"rounds": small}, f"{small} of the paper's {whole} rounds"),
        "tiny": Scale("tiny", tiny, f"6 of the paper's {whole} rounds, 4 of 20 clients, a small MLP"),
    }


def default_scale(data: str) -> str:
    """Return the scale of a data set if none is asked for."""
    return "small" if data == "digits" else "paper"


def preset(data: str, method: str = "feddpc", *, scale: str | None = None, **changes: Any) -> Config:
    """Return the configuration of a method on a data set; ``changes`` are values of other keys.

    >>> config = preset("cifar10", "fedprox", alpha=0.6, lr=0.01, hyper={"mu": 0.001})
    >>> config.rounds, config.server_lr, config.partition_options
    (400, 0.01, {'min_size': 10, 'alpha': 0.6})
    """
    sizes, scale = scales(data), scale or default_scale(data)
    if scale not in sizes:
        raise unknown("scale", scale, sizes)
    values: dict[str, Any] = {
        **PAPER,
        **_DATA[data],
        **sizes[scale].values,
        "alpha": 0.2,
        "seed": 0,
        **changes,
    }
    values.setdefault("server_lr", values["lr"])
    values["partition_options"] = {**values["partition_options"], "alpha": values["alpha"]}
    values["hyper"] = methods.create(method, **values.get("hyper", {})).hyper()
    return Config.read({**values, "data": data, "method": method})
