"""Networks by name, and what makes a user's own network fit for a federation.

Every model has ``features(x)``, the representation before the last layer, and ``head``, a linear layer, with
``forward(x) == head(features(x))``, and no buffers. All but a linear classifier also have ``trunk(x)``,
``last_stage(h, width)`` and ``top(o)``, with ``forward(x) == top(last_stage(trunk(x)))``. A network of one's own that
defines these works with the methods that ask for them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from feddpc.checks import check_int
from feddpc.data import Dataset
from feddpc.errors import BadInputError
from feddpc.models.groupnorm import check_supported, to_groupnorm
from feddpc.models.lenet import LeNet5
from feddpc.models.resnet import ResNet18
from feddpc.models.small import MLP, SmallCNN
from feddpc.registry import Registry, is_code
from feddpc.rng import torch_seed

__all__ = [
    "LARGE",
    "MLP",
    "MODELS",
    "LeNet5",
    "ResNet18",
    "SmallCNN",
    "check_supported",
    "default_for",
    "default_name",
    "make",
    "make_for",
    "model_shape",
    "names",
    "options",
    "seeded",
    "to_groupnorm",
]


def _is_model(thing: object) -> bool:
    return inspect.isfunction(thing) or (isinstance(thing, type) and issubclass(thing, nn.Module))


MODELS: Registry[nn.Module] = Registry(
    "model",
    {"lenet5": LeNet5, "resnet18": ResNet18, "cnn": SmallCNN, "mlp": MLP},
    arguments=("classes", "channels", "size", "shape"),
    accepts=_is_model,
)
#: Those that take only square images of bytes.
_FOR_IMAGES = ("lenet5", "resnet18", "cnn")

#: Models of which one run keeps a large GPU busy: several at once gain nothing and need more memory.
LARGE = frozenset({"resnet18"})


def names() -> list[str]:
    """Return the names of the models."""
    return MODELS.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a model with their defaults; a default of None is left out.

    >>> options("resnet18")
    {'stem': '7x7', 'groups': 2}
    """
    return {key: value for key, value in MODELS.options(name).items() if value is not None}


def make(name: str, *, classes: int, channels: int, size: int, **options: object) -> nn.Module:
    """Build the model ``name`` for square images of ``size`` pixels a side; the weights come from torch's generator.

    >>> make("mlp", classes=3, channels=1, size=2, hidden=[5])(torch.zeros(7, 1, 2, 2)).shape
    torch.Size([7, 3])
    """
    MODELS.builder(name, options)
    for field, value in (("classes", classes), ("channels", channels), ("size", size)):
        check_int(field, value, 1)
    return MODELS.build(name, {"classes": classes, "channels": channels, "size": size}, options)


def model_shape(data: Dataset) -> dict[str, object]:
    """Return what a model may be built from: ``classes``, the ``shape`` of an input, its ``channels`` and ``size``.

    Images of bytes arrive as ``(channels, height, width)``; they have a size where they are square. Floats arrive as
    they are, and count as rows of numbers: as many channels as numbers, and size 1.

    >>> import numpy as np
    >>> x, y = np.zeros((4, 30), np.float32), [0, 1, 2, 1]
    >>> model_shape(Dataset.from_arrays(x, y, x, y))
    {'classes': 3, 'shape': (30,), 'channels': 30, 'size': 1}
    """
    shape = data.sample_shape
    if not data.is_image:
        return {"classes": data.classes, "shape": shape, "channels": math.prod(shape), "size": 1}
    height, width, channels = shape
    known: dict[str, object] = {"classes": data.classes, "shape": (channels, height, width), "channels": channels}
    return known | ({"size": height} if height == width else {})


def default_name(data: Dataset) -> str:
    """Return the model to use for ``data`` when none is named."""
    if data.x_train.dtype.kind == "i":
        raise BadInputError(
            f"the samples of {data.name} are tokens ({data.x_train.dtype}), for which there is no default model: give "
            "one of your own, or samples as floats"
        )
    shape = model_shape(data)
    return default_for(classes=data.classes, size=int(str(shape["size"]))) if "size" in shape else "mlp"


def make_for(data: Dataset, name: str, options: Mapping[str, object], seed: int) -> nn.Module:
    """Build the model ``name``, or the user's own ``FILE.py:NAME``, for ``data``, with weights by ``seed``."""
    shape = model_shape(data)
    if name in _FOR_IMAGES and not (data.is_image and "size" in shape):
        raise BadInputError(
            f"{data.name}: samples are {'x'.join(map(str, data.sample_shape))} {data.x_train.dtype}, but the model "
            f"{name!r} is for square images of bytes: choose mlp, or give a model of your own"
        )
    if name == "mlp":  # takes any input as a row of numbers
        shape |= {"channels": math.prod(data.sample_shape), "size": 1}
    try:
        module = seeded(lambda: MODELS.build(name, shape, options), seed)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise BadInputError(f"model {name!r} with {dict(options)} cannot be built: {error}") from None
    except Exception as error:
        if not is_code(name):
            raise
        raise BadInputError(f"model {name!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise BadInputError(f"model {name!r} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return module


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
