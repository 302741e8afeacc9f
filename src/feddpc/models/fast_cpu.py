"""Small convolutions on a CPU, computed in another way with the same result.

Kernels for CPUs compute sixteen channels at a time, so a convolution to six wastes most of what they do, and so does
the gradient of one from six; max-pooling of few channels runs one number at a time. Here two neighbouring rows become
channels of one convolution with stride two, whose kernel is the given one at two places; pooling is then the larger of
two columns and of two channels. For GPUs there are kernels in
:mod:`feddpc.kernels.conv_pool`. Wide layers are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.kernels import conv_pool
from feddpc.kernels.group_norm import normalized
from feddpc.kernels.launch import usable

#: Up to so many channels, two rows of them fit into what the kernels compute at a time.
FEW = 8


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Apply ``layers`` one after the other; together: Conv2d of few channels, ReLU and 2x2 pooling; GroupNorm and ReLU.

    >>> layers = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
    >>> x = torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
    >>> torch.allclose(through(layers, x), layers(x), atol=1e-6)
    True
    """
    left = list(layers)
    while left:
        first = left[0]
        if x.is_cuda and usable(x.device) and _plain(left[:3]) and conv_pool.fits(first, x):  # type: ignore[arg-type]
            x = left[1](conv_pool.pooled(first, x))  # type: ignore[arg-type]
            left = left[3:]
        elif x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and _plain(left[:3]):
            conv, relu, pool = left[:3]
            assert isinstance(conv, nn.Conv2d)
            # The largest of rectified numbers is the largest number, rectified: a quarter of the work.
            x = relu(_pooled(conv, x) if _pairs(conv, x) else pool(_convolved(conv, x)))
            left = left[3:]
        elif isinstance(first, nn.GroupNorm) and x.is_cuda:
            then_relu = len(left) > 1 and type(left[1]) is nn.ReLU and not _hooked(left[1])
            x = normalized(first, x, relu=then_relu)
            left = left[1 + then_relu :]
        else:
            x = left.pop(0)(x)
    return x


def _plain(layers: list[nn.Module]) -> bool:
    """Whether these are a plain convolution, ReLU and 2x2 pooling, without hooks between them."""
    if [type(layer) for layer in layers] != [nn.Conv2d, nn.ReLU, nn.MaxPool2d]:
        return False
    if any(_hooked(layer) for layer in layers):
        return False
    conv, relu, pool = layers
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(relu, nn.ReLU)
    assert isinstance(pool, nn.MaxPool2d)
    simple = conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    halving = all(size in (2, (2, 2)) for size in (pool.kernel_size, pool.stride)) and pool.padding in (0, (0, 0))
    usual = pool.dilation in (1, (1, 1)) and not (pool.ceil_mode or pool.return_indices or relu.inplace)
    return simple and halving and usual and not isinstance(conv.padding, str)


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _pairs(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether the output has few channels, and rows and columns that make whole pairs."""
    assert not isinstance(conv.padding, str)
    sides = zip(x.shape[-2:], conv.padding, conv.kernel_size, strict=True)
    return conv.out_channels <= FEW and x.ndim == 4 and all((n + 2 * p - k) % 2 for n, p, k in sides)


def _pooled(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the pooled convolution: two rows at a time, the larger of two columns, the larger of two rows."""
    h = F.conv2d(x, _twice(conv.weight), stride=(2, 1), padding=conv.padding)
    h = h.permute(0, 2, 3, 1)  # the order in which it lies in memory, for images with their channels together
    n, rows, columns, channels = h.shape
    h = _larger(h.reshape(n, rows, columns // 2, 2, channels), 3)
    h = _larger(h.reshape(n, rows, columns // 2, 2, channels // 2), 3)
    h = h if conv.bias is None else h + conv.bias
    return h.permute(0, 3, 1, 2)


def _twice(weight: Tensor) -> Tensor:
    """Return the kernel at two neighbouring rows of a kernel that is higher by one, one after the other."""
    return torch.cat((F.pad(weight, (0, 0, 0, 1)), F.pad(weight, (0, 0, 1, 0))))


def _convolved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the convolution; that of few channels with a faster gradient of its input."""
    assert not isinstance(conv.padding, str)
    fits = all(p < k for p, k in zip(conv.padding, conv.kernel_size, strict=True))
    if conv.in_channels <= FEW and x.requires_grad and x.ndim == 4 and fits and x.shape[-2] % 2 == 0:
        result: Tensor = _FromFew.apply(x, conv.weight, conv.bias, conv.padding)  # type: ignore[no-untyped-call]
        return result
    plain: Tensor = conv(x)
    return plain


def _larger(h: Tensor, dim: int) -> Tensor:
    result: Tensor = _Larger.apply(h, dim)  # type: ignore[no-untyped-call]
    return result


class _Larger(torch.autograd.Function):
    """The larger of two slices; of equal ones the first takes the gradient, as in max-pooling."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, dim: int) -> Tensor:
        return torch.maximum(*h.unbind(dim))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.dim = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        first, second = h.unbind(ctx.dim)
        # ReLU's gradient is a masked copy that runs on whole vectors; torch.where is ten times slower.
        to_second = torch.ops.aten.threshold_backward(g, second - first, 0)
        return torch.stack((g - to_second, to_second), ctx.dim), None


class _FromFew(torch.autograd.Function):
    """A convolution whose input's gradient, again a convolution, is computed two rows at a time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        x, weight, bias, ctx.padding = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        outs, ins, *size = weight.shape
        wanted = [False, True, ctx.biased]
        _, by_weight, by_bias = torch.ops.aten.convolution_backward(
            g, x, weight, [outs], [1, 1], list(ctx.padding), [1, 1], False, [0, 0], 1, wanted
        )
        margin = [k - 1 - p for k, p in zip(size, ctx.padding, strict=True)]
        back = _twice(weight.flip(2, 3).transpose(0, 1))
        # This one is faster on channels that lie apart.
        pairs = F.conv2d(g.contiguous(), back, stride=(2, 1), padding=margin)
        n, _, half, columns = pairs.shape
        pairs = pairs.view(n, 2, ins, half, columns).permute(0, 3, 1, 4, 2)
        return pairs.reshape(n, 2 * half, columns, ins).permute(0, 3, 1, 2), by_weight, by_bias, None
