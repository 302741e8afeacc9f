"""ResNet18 with GroupNorm in the place of BatchNorm, whose running statistics do not survive averaging over clients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.checks import check_int
from feddpc.errors import BadInputError, unknown
from feddpc.kernels.group_norm import normalized
from feddpc.models.base import BodyAndHead, Sections
from feddpc.models.fast_cpu import through
from feddpc.models.narrow import narrowed

_WIDTHS = (64, 128, 256, 512)


class ResNet18(BodyAndHead):
    """Eighteen layers in four stages of two residual blocks each, then the global average and a linear head.

    ``stem="7x7"`` is that of ImageNet networks (stride 2, then max-pooling; a 32-fold shrinking), ``"3x3"`` that of
    CIFAR networks (8-fold, at 15 times the work). ``groups=2`` is what FedDyn, FedDC and FedExP use,
    32 what Wu and He propose.

    ``init="torchvision"`` starts convolutions as torchvision does: normal, variance 2 / fan-out. ``"torch"`` leaves
    them as ``torch.nn.Conv2d`` makes them: uniform, variance 1 / (3 fan-in), 2.4 times shorter. Before GroupNorm the
    length of a convolution's weights does not change the output, only how far a step turns them: the shorter start is
    the larger effective rate. On CIFAR-100, 800 rounds of FedDPC at rate 0.01 reach 35.3 % with torch's start and
    32.6 % with torchvision's, those of FedAvg 30.7 and 28.2 %; after 40 rounds torchvision's is ahead.

    References: He et al., "Deep residual learning for image recognition", 2016; Wu and He, "Group normalization", 2018.

    >>> sum(p.numel() for p in ResNet18(classes=100).parameters())
    11227812
    """

    def __init__(
        self,
        classes: int = 100,
        channels: int = 3,
        size: int = 32,
        *,
        stem: str = "7x7",
        groups: int = 2,
        init: str = "torchvision",
    ) -> None:
        super().__init__()
        check_int("size", size, 1)  # any size works: padding keeps the smallest map at 1x1
        if _WIDTHS[0] % check_int("groups", groups, 1):
            raise BadInputError(f"groups = {groups}: must divide the {_WIDTHS[0]} channels of resnet18's first stage")
        if stem not in ("7x7", "3x3"):
            raise unknown("stem of resnet18", str(stem), ("7x7", "3x3"))
        if init not in ("torch", "torchvision"):
            raise unknown("init of resnet18", str(init), ("torch", "torchvision"))
        first = (
            [Halving(channels, 64, 7, 2, 3, bias=False), nn.GroupNorm(groups, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
            if stem == "7x7"
            else [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(groups, 64), nn.ReLU()]
        )
        self.stem = nn.Sequential(*first)
        stages = []
        before = 64
        for width in _WIDTHS:
            stages += [_ResidualBlock(before, width, groups), _ResidualBlock(width, width, groups)]
            before = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)
        for module in self.modules() if init == "torchvision" else ():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer sees, ``[batch, 512]``."""
        out: Tensor = self.stages(through(self.stem, x))
        return out.mean((2, 3))

    def sections(self) -> Sections:
        """Split before the last two blocks; the average comes after them."""
        blocks = list(self.stages)
        return Sections([self.stem, *blocks[:-2]], blocks[-2:], [_Average()])


class Convolution(nn.Conv2d):
    """A convolution; computed as a matrix product where the map is so small that the kernel fits in one position only.

    >>> import torch
    >>> x, layer = torch.ones(1, 2, 1, 1), Convolution(2, 3, 3, padding=1)
    >>> torch.allclose(layer(x), nn.Conv2d.forward(layer, x))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps."""
        assert not isinstance(self.padding, str)
        sides = list(zip(x.shape[-2:], self.padding, self.kernel_size, self.stride, strict=True))
        if self.groups != 1 or any((n + 2 * p - k) // s for n, p, k, s in sides):
            return super().forward(x)
        (down, right), (high, wide) = self.padding, (min(n, k - p) for n, p, k, _ in sides)
        met = self.weight[:, :, down : down + high, right : right + wide]
        return F.linear(x[:, :, :high, :wide].flatten(1), met.flatten(1), self.bias)[..., None, None]


class Halving(nn.Conv2d):
    """A convolution with stride 2; on a GPU one of blocks of 2x2 pixels, with four times the channels and stride 1.

    Matrix units want sixteen channels; from three, most of what they do would be padding.
    """

    FULL = 16

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps."""
        together = x.stride(1) == 1 < x.shape[1]  # as engines lay images out for matrix units
        return self.by_blocks(x) if x.is_cuda and together and self.fits(x) else super().forward(x)

    def fits(self, x: Tensor) -> bool:
        """Whether there are few channels, and both kernel and image are made of whole blocks."""
        few = 4 * self.in_channels <= self.FULL and self.groups == 1 and self.stride == (2, 2)
        middle = self.padding == tuple(k // 2 for k in self.kernel_size) and all(k % 4 == 3 for k in self.kernel_size)
        return few and middle and not any(n % 2 for n in x.shape[-2:])

    def by_blocks(self, x: Tensor) -> Tensor:
        """Return the maps, computed from blocks."""
        assert not isinstance(self.padding, str)
        above, left = ((p + 1) // 2 for p in self.padding)  # blocks of padding; one less on the other side
        x = _blocks(x, self.FULL, (left, left - 1, above, above - 1))
        return F.conv2d(x, _blocks(F.pad(self.weight, (1, 0, 1, 0)), self.FULL), self.bias)


def _blocks(x: Tensor, channels: int, padding: tuple[int, ...] = (0, 0, 0, 0)) -> Tensor:
    """Return ``[n, c, 2h, 2w]`` as ``[n, channels, h, w]``, channels together: blocks of 2x2, and zeros around them."""
    n, c, high, wide = x.shape
    x = x.view(n, c, high // 2, 2, wide // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(n, high // 2, wide // 2, 4 * c)
    return F.pad(x, (0, channels - 4 * c, *padding)).permute(0, 3, 1, 2)


class _ResidualBlock(nn.Module):
    """relu(x + two 3x3 convolutions of x); where the width grows, the map halves and a 1x1 convolution fits x to it."""

    def __init__(self, before: int, width: int, groups: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(
            Convolution(before, width, 3, stride, 1, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            Convolution(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(groups, width),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(Convolution(before, width, 1, stride, bias=False), nn.GroupNorm(groups, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        *layers, norm = self.body
        shortcut = through(self.shortcut, x) if isinstance(self.shortcut, nn.Sequential) else x
        return normalized(norm, through(layers, x), shortcut, relu=True)  # type: ignore[arg-type]

    def narrowed(self, h: Tensor, width: float) -> Tensor:
        return (narrowed(self.shortcut, h, width) + narrowed(self.body, h, width)).relu()


class _Average(nn.Module):
    """The mean of every channel."""

    def forward(self, o: Tensor) -> Tensor:
        return o.mean((2, 3))
