"""Pooled convolutions as one operation: values, gradients, stacks of networks, and the kernels for a GPU."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from feddpc.kernels import conv_pool, launch
from feddpc.models.fast_cpu import through
from support import DEVICE

CASES = {
    "lenet, first": (nn.Conv2d(3, 6, 5), 12),
    "lenet, second": (nn.Conv2d(6, 16, 5), 14),
    "padded": (nn.Conv2d(2, 4, 3, padding=1), 10),
    "not square, no bias": (nn.Conv2d(1, 3, (3, 5), padding=(0, 2), bias=False), 12),
}


class Pooled(nn.Module):
    def __init__(self, conv, plain):
        super().__init__()
        self.conv, self.plain = conv, plain

    def forward(self, x):
        return F.max_pool2d(self.conv(x), 2) if self.plain else conv_pool.pooled(self.conv, x)


def close(a, b):
    a, b = a.detach().double(), b.detach().double()
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["apart", "together"])
def test_values_and_gradients_are_those_of_the_plain_layers(case, layout):
    conv, size = CASES[case]
    conv = conv.to(DEVICE)
    x = torch.randn(5, conv.in_channels, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x.contiguous(memory_format=layout).requires_grad_()
    assert conv_pool.fits(conv, x)
    own = Pooled(conv, False)(x)
    slope = torch.linspace(-1, 1, own.numel(), device=DEVICE).view(own.shape)
    gradients = torch.autograd.grad(own, [x, *conv.parameters()], slope)
    # The reference in double precision: a GPU may round what it multiplies for convolutions.
    exact, x = copy.deepcopy(conv).double(), x.detach().double().requires_grad_()
    plain = Pooled(exact, True)(x)
    close(own, plain)
    for a, b in zip(gradients, torch.autograd.grad(plain, [x, *exact.parameters()], slope.double()), strict=True):
        close(a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("traced", [False, True])
def test_a_stack_of_networks(case, traced):
    """Gradients of all networks at once, also when traced for a compiler."""
    conv, size = CASES[case]
    conv = conv.to(DEVICE)
    stack = {f"conv.{n}": torch.stack([p.detach() * s for s in (1, -2, 3)]) for n, p in conv.named_parameters()}
    x = torch.randn(3, 4, conv.in_channels, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def gradients(plain):
        module = Pooled(copy.deepcopy(conv).double() if plain else conv, plain)

        def loss(parameters, x):
            return functional_call(module, parameters, (x,)).square().sum()

        return vmap(grad(loss, argnums=(0, 1)))

    program = make_fx(gradients(False))(stack, x) if traced else gradients(False)
    exact = {key: value.double() for key, value in stack.items()}
    (a, ax), (b, bx) = program(stack, x), gradients(True)(exact, x.double())
    close(ax, bx)
    for key in b:
        close(a[key], b[key])


def test_equal_numbers_give_their_gradient_to_the_first():
    conv = nn.Conv2d(2, 3, 3, bias=False).to(DEVICE)
    with torch.no_grad():
        conv.weight.fill_(1.0)
    x = torch.ones(1, 2, 8, 8, device=DEVICE, requires_grad=True)
    a, b = (torch.autograd.grad(Pooled(conv, plain)(x).sum(), x)[0] for plain in (False, True))
    assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_not_lost_in_a_comparison(bad):
    conv = nn.Conv2d(1, 1, 3, bias=False).to(DEVICE)
    for at in range(36):
        x = torch.zeros(1, 1, 6, 6, device=DEVICE)
        x.view(-1)[at] = bad
        assert not conv_pool.pooled(conv, x).isfinite().all() or bad > 0
        if bad != bad:
            assert conv_pool.pooled(conv, x).isnan().any()


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv2d(3, 6, 4), 12),
        (nn.Conv2d(3, 6, 5), 13),
        (nn.Conv2d(3, 17, 5), 12),
        (nn.Conv2d(17, 3, 5), 12),
        (nn.Conv2d(3, 6, 13), 12),
    ],
)
def test_what_does_not_fit_is_left_to_others(conv, size):
    assert not conv_pool.fits(conv, torch.zeros(1, conv.in_channels, size, size))


def test_double_precision_is_left_to_others():
    assert not conv_pool.fits(nn.Conv2d(3, 6, 5).double(), torch.zeros(1, 3, 12, 12, dtype=torch.float64))


@pytest.mark.parametrize("half", [False, True])
def test_a_network_has_the_values_of_its_layers_in_either_precision(half):
    layers = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)
    x = torch.randn(7, 3, 32, 32, device=DEVICE)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=half):
        a, b = through(layers, x), layers(x)
    torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-2 if half else 1e-5, atol=2e-2 if half else 1e-5)


def test_where_kernels_cannot_be_compiled_it_is_said(monkeypatch):
    device = torch.device("cuda", 99)  # nobody has so many
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not launch.usable.__wrapped__(device)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.warns(UserWarning, match="no kernels can be compiled for cuda:99, slower operations are used: "):
        assert not launch.usable.__wrapped__(device)
