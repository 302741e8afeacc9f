"""Networks by name, and what makes a user's own network fit for a federation.

Every model for images and tables has ``features(x)``, the representation before the last layer, and ``head``, a linear
layer, with ``forward(x) == head(features(x))``, and no buffers. All but a linear classifier also have ``trunk(x)``,
``last_stage(h, width)`` and ``top(o)``, with ``forward(x) == top(last_stage(trunk(x)))``. A network of your own that
defines these works with the methods that ask for them. Of these parts the models for text have only ``head``; methods
that ask for the others refuse them.
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
from feddpc.models.small import MLP, McMahanCNN, SmallCNN
from feddpc.models.text import CharacterLSTM, Transformer
from feddpc.registry import Registry, is_code
from feddpc.rng import torch_seed

__all__ = [
    "LARGE",
    "MLP",
    "MODELS",
    "CharacterLSTM",
    "LeNet5",
    "McMahanCNN",
    "ResNet18",
    "SmallCNN",
    "Transformer",
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
    "vectorizes",
]


def _is_model(thing: object) -> bool:
    return inspect.isfunction(thing) or (isinstance(thing, type) and issubclass(thing, nn.Module))


MODELS: Registry[nn.Module] = Registry(
    "model",
    {
        "lenet5": LeNet5,
        "resnet18": ResNet18,
        "cnn": SmallCNN,
        "mcmahan-cnn": McMahanCNN,
        "mlp": MLP,
        "lstm": CharacterLSTM,
        "transformer": Transformer,
    },
    arguments=("classes", "outputs", "vocabulary", "channels", "size", "shape"),
    accepts=_is_model,
)
#: Those that take only square images of bytes.
_FOR_IMAGES = ("lenet5", "resnet18", "cnn", "mcmahan-cnn")
#: Those that take sequences of tokens and predict one at every position.
_FOR_TEXT = ("lstm", "transformer")

#: Models of which one run keeps a large GPU busy: several at once gain nothing and need more memory.
LARGE = frozenset({"resnet18"})


def names() -> list[str]:
    """Return the names of the models."""
    return MODELS.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a model with their defaults; a default of None is left out.

    >>> options("resnet18")
    {'stem': '7x7', 'groups': 2, 'init': 'torchvision'}
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
    """Return what a model may be built from: numbers of its outputs, and shapes of its input.

    ``outputs`` is the number of scores or values per sample, or per position where the targets are tokens; ``classes``
    is another name for it. ``shape`` is the shape of an input, ``channels`` and ``size`` say the same of a square
    image. Images of bytes arrive as ``(channels, height, width)``; they have a size where they are square. Floats
    arrive as they are, and count as rows of numbers: as many channels as numbers, and size 1. Tokens have a
    ``vocabulary``, the number of different ones.

    >>> import numpy as np
    >>> x, y = np.zeros((4, 30), np.float32), [0, 1, 2, 1]
    >>> model_shape(Dataset.from_arrays(x, y, x, y))
    {'classes': 3, 'outputs': 3, 'shape': (30,), 'channels': 30, 'size': 1}
    >>> tokens = np.array([[5, 0, 6], [1, 2, 3]])
    >>> model_shape(Dataset.from_arrays(tokens, tokens, tokens, tokens))
    {'classes': 7, 'outputs': 7, 'shape': (3,), 'vocabulary': 7}
    """
    shape = data.sample_shape
    known: dict[str, object] = {"classes": data.classes, "outputs": data.classes}
    if data.is_image:
        height, width, channels = shape
        known |= {"shape": (channels, height, width), "channels": channels}
        return known | ({"size": height} if height == width else {})
    known["shape"] = shape
    if data.x_train.dtype.kind == "i":
        largest = max(int(data.x_train.max()), int(data.x_test.max()))
        return known | {"vocabulary": data.classes if data.target == "tokens" else largest + 1}
    return known | {"channels": math.prod(shape), "size": 1}


def default_name(data: Dataset) -> str:
    """Return the model to use for ``data`` when none is named."""
    if data.target == "tokens" and _holds_sequences(data):
        return "transformer"
    if data.x_train.dtype.kind == "i" or data.target == "tokens":
        raise BadInputError(
            f"the samples of {data.name} are {data.x_train.dtype} and its targets {data.target}, for which there is no "
            "default model: give one of your own; tokens that are to be classified need one, integers that are no "
            "tokens should be floats"
        )
    shape = model_shape(data)
    return default_for(classes=data.classes, size=int(str(shape["size"]))) if "size" in shape else "mlp"


def _holds_sequences(data: Dataset) -> bool:
    """Whether samples are sequences of tokens, ``[n, T]``."""
    return data.x_train.dtype.kind == "i" and len(data.sample_shape) == 1


def make_for(data: Dataset, name: str, options: Mapping[str, object], seed: int) -> nn.Module:
    """Build the model ``name``, or the user's own ``FILE.py:NAME``, for ``data``, with weights by ``seed``."""
    shape = model_shape(data)
    samples = f"{data.name}: samples are {'x'.join(map(str, data.sample_shape))} {data.x_train.dtype}"
    if name in _FOR_IMAGES and not (data.is_image and "size" in shape):
        raise BadInputError(
            f"{samples}, but the model {name!r} is for square images of bytes: choose mlp, or give a model of your own"
        )
    if name in _FOR_TEXT and not (data.target == "tokens" and _holds_sequences(data)):
        raise BadInputError(
            f"{samples} and targets {data.target}, but the model {name!r} predicts tokens at every position of a "
            "sequence of tokens: choose mlp, or give a model of your own"
        )
    if name in (*_FOR_IMAGES, "mlp") and data.target == "tokens":
        raise BadInputError(
            f"{data.name}: targets are tokens, but the model {name!r} has one output per sample, not per position: "
            f"choose {' or '.join(_FOR_TEXT)}, or give a model of your own"
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


def vectorizes(module: nn.Module) -> bool:
    """Say whether one call under ``vmap`` computes several clients faster than a call per client.

    torch's LSTM, GRU and RNN have no rule for ``vmap``: on a CPU it runs them one by one, on a GPU it fails, as do all
    function transforms.

    >>> vectorizes(Transformer(65)), vectorizes(CharacterLSTM(65))
    (True, False)
    """
    return not any(isinstance(part, nn.RNNBase) for part in module.modules())


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
