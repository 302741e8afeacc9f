"""Convolution, ReLU and pooling taken together on a CPU: the values and gradients of the plain layers."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from feddpc import models
from feddpc.models import fast_cpu
from feddpc.models.fast_cpu import through

CASES = {
    "few out": (nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), 12),
    "few out, padded": (nn.Conv2d(2, 8, 3, padding=1), nn.MaxPool2d(2, 2), 8),
    "few out, no bias": (nn.Conv2d(3, 4, (3, 5), bias=False, padding=(1, 2)), nn.MaxPool2d((2, 2)), 8),
    "few in": (nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), 14),
    "few in, padded": (nn.Conv2d(3, 12, 3, padding=1), nn.MaxPool2d(2), 8),
    "few in, no bias": (nn.Conv2d(3, 9, (3, 5), bias=False, padding=(0, 4)), nn.MaxPool2d(2), 10),
    "odd": (nn.Conv2d(3, 6, 4), nn.MaxPool2d(2), 12),
    "odd input": (nn.Conv2d(6, 16, 4), nn.MaxPool2d(2), 13),
    "wide": (nn.Conv2d(9, 10, 3), nn.MaxPool2d(2), 8),
    "strided": (nn.Conv2d(3, 6, 5, stride=2), nn.MaxPool2d(2), 15),
    "groups": (nn.Conv2d(4, 8, 3, groups=2), nn.MaxPool2d(2), 8),
    "same": (nn.Conv2d(3, 6, 3, padding="same"), nn.MaxPool2d(2), 8),
    "reflected": (nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(2), 8),
    "overlapping": (nn.Conv2d(3, 6, 3), nn.MaxPool2d(3, 2), 9),
    "upwards": (nn.Conv2d(3, 6, 4), nn.MaxPool2d(2, ceil_mode=True), 12),
}


def both(layers, x):
    """Value and gradients of the input and all parameters, in both ways."""
    weights = torch.linspace(-1, 2, 7, dtype=x.dtype)
    for way in (lambda x: through(layers, x), layers):
        at = x.clone().requires_grad_()
        out = way(at)
        loss = (out.flatten() * weights.repeat(out.numel() // 7 + 1)[: out.numel()]).sum()
        yield out.detach(), torch.autograd.grad(loss, [at, *layers.parameters()])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["apart", "together"])
def test_values_and_gradients_are_those_of_the_plain_layers(case, layout):
    conv, pool, size = CASES[case]
    layers = nn.Sequential(copy.deepcopy(conv), nn.ReLU(), pool).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, conv.in_channels, size, size, generator=generator, dtype=torch.float64)
    (value, gradients), (plain, plain_gradients) = both(layers, x.contiguous(memory_format=layout))
    torch.testing.assert_close(value, plain, rtol=0, atol=1e-12)
    for g, p in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(g, p, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", ["few out", "few out, padded", "few in", "wide"])
def test_equal_numbers_give_their_gradient_to_the_first(case):
    """Whole numbers make ties, also at zero, and leave no rounding."""
    conv, pool, size = CASES[case]
    layers = nn.Sequential(copy.deepcopy(conv), nn.ReLU(), pool).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randint(-1, 2, p.shape, generator=generator))
    x = torch.randint(0, 2, (20, conv.in_channels, size, size), generator=generator).double()
    largest = layers[0](x).unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).sort(-1).values[..., 2:]
    assert ((largest[..., 0] == largest[..., 1]) & (largest[..., 1] > 0)).sum() > 20
    (value, gradients), (plain, plain_gradients) = both(layers, x)
    assert torch.equal(value, plain)
    for g, p in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(g, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["few out", "few in"])
def test_function_transforms_work(case):
    """A stack of networks, each with its own gradient: what the engine `stacked` asks for."""
    conv, pool, size = CASES[case]
    layers = nn.Sequential(copy.deepcopy(conv), nn.ReLU(), pool).double()
    stack = {n: torch.stack([p.detach() * k for k in (1.0, 0.5)]) for n, p in layers.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, conv.in_channels, size, size, generator=generator, dtype=torch.float64)

    class Together(nn.Sequential):
        def forward(self, x):
            return through(self, x)

    def loss(net):
        return lambda parameters, x: functional_call(net, parameters, (x,)).square().sum()

    (by_weight, by_x), plain = (vmap(grad(loss(net), argnums=(0, 1)))(stack, x) for net in (Together(*layers), layers))
    torch.testing.assert_close(by_x, plain[1], rtol=0, atol=1e-11)
    for name, g in by_weight.items():
        torch.testing.assert_close(g, plain[0][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    layers = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.zeros(1, 3, 12, 12)
    x[0, 1, 5, 5] = bad
    with torch.no_grad():
        for way in (layers, lambda x: through(layers, x)):
            out = way(x)
            assert not out.isfinite().all()


def test_lenet_takes_the_short_way_and_smallcnn_too(monkeypatch):
    calls = []
    monkeypatch.setattr(
        fast_cpu, "_pooled", lambda conv, x, whole=fast_cpu._pooled: calls.append(conv) or whole(conv, x)
    )
    net = models.LeNet5()
    x = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(net(x), net.head(net.body(x)), rtol=0, atol=1e-6)
    torch.testing.assert_close(net.top(net.last_stage(net.trunk(x))), net(x), rtol=0, atol=1e-6)
    assert calls == [net.body[0]] * 3
    small = models.SmallCNN()
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(small(x), small.head(small.body(x)))
    assert len(calls) == 3


def test_whoever_listens_to_a_layer_hears_it():
    layers = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
    heard = []
    layers[0].register_forward_hook(lambda *args: heard.append(args[2].shape))
    through(layers, torch.zeros(1, 3, 12, 12))
    assert heard == [(1, 6, 8, 8)]


def test_rounded_networks_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(fast_cpu, "_pooled", None)
    layers = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.zeros(1, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(through(layers, x), layers(x))
