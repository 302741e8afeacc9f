"""Small models for small images, quick tests and tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from feddpc.checks import check_int
from feddpc.errors import BadInputError
from feddpc.models.base import BodyAndHead


class SmallCNN(BodyAndHead):
    """Two padded 3x3 convolutions, each with ReLU and 2x2 max-pooling, then a linear head; for 8x8 digits and up.

    >>> sum(p.numel() for p in SmallCNN(classes=10, channels=1, size=8).parameters())
    6090
    """

    stage = slice(3, 5)  # the second convolution and its ReLU

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8, *, width: int = 16) -> None:
        super().__init__()
        if size < 4:
            raise BadInputError(f"size = {size} is too small for cnn, whose smallest image is 4x4: choose mlp")
        check_int("width", width, 1)
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * (size // 4) ** 2, classes)


class McMahanCNN(BodyAndHead):
    """The CNN of the first paper on federated averaging, for 28x28 or 32x32 images.

    Two padded 5x5 convolutions of 32 and 64 channels, each with ReLU and 2x2 max-pooling, then 512 units and the head.

    Reference: McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017.

    >>> sum(p.numel() for p in McMahanCNN(classes=10, channels=1, size=28).parameters())
    1663370
    """

    stage = slice(3, 5)  # the second convolution and its ReLU

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        if size < 4:
            raise BadInputError(f"size = {size} is too small for mcmahan-cnn, whose smallest image is 4x4: choose mlp")
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (size // 4) ** 2, 512),
            nn.ReLU(),
        )
        self.head = nn.Linear(512, classes)


class MLP(BodyAndHead):
    """Linear layers with ReLU between them, on the flattened input; without hidden layers, a linear classifier.

    For rows of n numbers give ``channels=n, size=1``.

    >>> sum(p.numel() for p in MLP(classes=10, channels=1, size=8).parameters())
    4810
    """

    stage = slice(-2, None)  # the last hidden layer and its ReLU

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8, *, hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        if not isinstance(hidden, list | tuple):  # a configuration may hold anything, a number for instance
            raise BadInputError(f"hidden = {hidden!r}: must be a list of layer widths, such as [64] or [128, 64]")
        layers: list[nn.Module] = [nn.Flatten()]
        before = channels * check_int("size", size, 1) ** 2
        for width in hidden:
            layers += [nn.Linear(before, check_int("hidden", width, 1)), nn.ReLU()]
            before = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)
        if not hidden:
            self.lacks = ("trunk", "last_stage", "top")
