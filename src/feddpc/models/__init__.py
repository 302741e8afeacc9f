"""Networks by name, and what makes a user's own network fit for a federation.

Every model has ``features(x)``, the representation before the last layer, and ``head``, a linear layer, with
``forward(x) == head(features(x))``, and no buffers. All but a linear classifier also have ``trunk(x)``,
``last_stage(h, width)`` and ``top(o)``, with ``forward(x) == top(last_stage(trunk(x)))``. A network of one's own that
defines these works with the methods that ask for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from feddpc.checks import check_int
from feddpc.models.groupnorm import check_supported, to_groupnorm
from feddpc.models.lenet import LeNet5
from feddpc.models.resnet import ResNet18
from feddpc.models.small import MLP, SmallCNN
from feddpc.registry import Registry
from feddpc.rng import torch_seed

__all__ = [
    "LARGE",
    "MLP",
    "LeNet5",
    "ResNet18",
    "SmallCNN",
    "check_supported",
    "default_for",
    "make",
    "names",
    "options",
    "seeded",
    "to_groupnorm",
]

_MENU: Registry[nn.Module] = Registry("model", {"lenet5": LeNet5, "resnet18": ResNet18, "cnn": SmallCNN, "mlp": MLP})

#: Models of which one run keeps a large GPU busy: several at once gain nothing, and want their memory all the same.
LARGE = frozenset({"resnet18"})


def names() -> list[str]:
    """Return the names of the models."""
    return _MENU.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a model with their defaults.

    >>> options("resnet18")
    {'stem': '7x7', 'groups': 2}
    """
    return _MENU.options(name)


def make(name: str, *, classes: int, channels: int, size: int, **options: object) -> nn.Module:
    """Build the model ``name`` for square images of ``size`` pixels a side; the weights come from torch's generator.

    >>> make("mlp", classes=3, channels=1, size=2, hidden=[5])(torch.zeros(7, 1, 2, 2)).shape
    torch.Size([7, 3])
    """
    build = _MENU.builder(name, options)
    for field, value in (("classes", classes), ("channels", channels), ("size", size)):
        check_int(field, value, 1)
    return build(classes, channels, size, **options)


def default_for(*, classes: int, size: int) -> str:
    """Return the model to use when none is named: the paper's where it applies, smaller ones for smaller images.

    >>> [default_for(classes=r, size=s) for r, s in [(200, 64), (10, 32), (10, 28), (10, 8), (3, 1)]]
    ['resnet18', 'lenet5', 'lenet5', 'cnn', 'mlp']
    """
    if classes >= 100 and size >= 32:
        return "resnet18"
    if size >= 28:
        return "lenet5"
    return "cnn" if size >= 4 else "mlp"


def seeded(build: Callable[[], nn.Module], seed: int, purpose: str = "model") -> nn.Module:
    """Return ``build()`` with weights that depend on ``seed`` and ``purpose`` alone.

    Torch's global generators are left as they were. The model is built on the CPU, also under another default device,
    so that all machines start from the same weights.

    >>> a, b = (seeded(lambda: nn.Linear(2, 1), seed=3) for _ in range(2))
    >>> bool((a.weight == b.weight).all())
    True
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed, which would reseed the accelerators too, and those are not restored afterwards.
        torch.default_generator.manual_seed(torch_seed(seed, purpose))
        return build()
