"""LeNet5 as federated-learning papers use it: ReLU, max-pooling, PyTorch's default initialisation."""

from __future__ import annotations

from torch import nn

from feddpc.errors import BadInputError, unknown
from feddpc.models.base import BodyAndHead

# conv, conv, fully connected, fully connected
_WIDTHS = {"A": (6, 16, 120, 84), "B": (64, 64, 384, 192)}
_SMALLEST = 16


class LeNet5(BodyAndHead):
    """Two 5x5 convolutions without padding, each with 2x2 max-pooling, then three linear layers.

    | variant | layers | parameters, CIFAR-10 | used in |
    |---|---|---|---|
    | A | conv 6, conv 16, fc 120, fc 84 | 62,006 | MOON, MIFA, GradAlign; what the name usually means |
    | B | conv 64, conv 64, fc 384, fc 192 | 797,962 | FedDyn, FedDC |

    Reference: LeCun et al., "Gradient-based learning applied to document recognition", 1998 (with tanh and averages).

    >>> sum(p.numel() for p in LeNet5().parameters())
    62006
    """

    stage = slice(3, 5)  # the second convolution and its ReLU

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32, *, variant: str = "A") -> None:
        super().__init__()
        if variant not in _WIDTHS:
            raise unknown("variant of lenet5", str(variant), _WIDTHS)
        if size < _SMALLEST:
            raise BadInputError(
                f"size = {size} is too small for lenet5, whose smallest image is {_SMALLEST}x{_SMALLEST}: "
                "choose cnn or mlp"
            )
        first, second, third, fourth = _WIDTHS[variant]
        left = ((size - 4) // 2 - 4) // 2
        self.body = nn.Sequential(
            nn.Conv2d(channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * left * left, third),
            nn.ReLU(),
            nn.Linear(third, fourth),
            nn.ReLU(),
        )
        self.head = nn.Linear(fourth, classes)
