"""Networks of the user's own get the kernel for GroupNorm, addition and ReLU, and compute what they computed."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from feddpc.kernels import group_norm
from feddpc.models import lenet, norm_fusion, resnet
from feddpc.models.norm_fusion import FusedNorm, fused
from support import DEVICE


@pytest.fixture(autouse=True)
def _also_on_a_cpu(monkeypatch):
    monkeypatch.setattr(group_norm, "usable", lambda device: True)


@pytest.fixture
def calls(monkeypatch):
    """Per call of the operation: whether something was added, and whether there was a ReLU."""
    seen = []

    def noting(norm, x, residual=None, *, relu=False):
        seen.append((residual is not None, relu))
        return group_norm.normalized(norm, x, residual, relu=relu)

    monkeypatch.setattr(norm_fusion, "normalized", noting)
    return seen


class Block(nn.Module):
    """As in torchvision: one ReLU for both places, the sum in place."""

    def __init__(self, channels, groups):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(groups, channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += identity
        return self.relu(out)


class Odd(nn.Module):
    """Odd numbers of channels and pixels, several groups, every way to write a ReLU."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 15, 3), nn.GroupNorm(3, 15), nn.ReLU())
        self.block = Block(15, 5)
        self.down = nn.Sequential(nn.Conv2d(15, 21, 1, stride=2), nn.GroupNorm(7, 21))
        self.conv, self.norm = nn.Conv2d(15, 21, 3, stride=2, padding=1), nn.GroupNorm(1, 21, affine=False)
        self.last, self.alone = nn.GroupNorm(21, 21), nn.GroupNorm(3, 21)
        self.head = nn.Linear(21, 4)

    def forward(self, x):
        x = self.block(self.first(x))
        x = F.relu(torch.add(self.down(x), self.norm(self.conv(x))), inplace=True)
        x = self.last(x).relu()
        return self.head(self.alone(x).mean((2, 3)))


def values(net, x):
    parameters = list(net.parameters())
    out = net(x)
    return [out, *torch.autograd.grad(out.square().sum(), parameters)]


def plain_and_fused(net, x):
    net = net.to(DEVICE)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in net.parameters():
            p.add_(0.3 * torch.rand(p.shape, generator=generator).to(DEVICE))
    x = x.to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return net, fused(net, x), x


def images(channels=3, size=9):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_a_network_with_odd_channels_and_groups(calls):
    net, twin, x = plain_and_fused(Odd(), images())
    calls.clear()
    for mine, theirs in zip(values(twin, x), values(net, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    # first, block (twice), down and its sum, the other branch alone, last, alone
    assert sorted(calls) == sorted(
        [(False, True), (False, True), (True, True), (True, True), (False, False), (False, True), (False, False)]
    )


def test_names_and_parameters_are_those_of_the_network():
    net, twin, _ = plain_and_fused(Odd(), images())
    assert twin is not net
    assert all(a is b for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert not any(isinstance(part, FusedNorm) for part in net.modules())
    assert isinstance(twin, Odd)


def test_gradients_in_a_stack_of_networks():
    net, twin, x = plain_and_fused(Odd(), images())
    stack = {n: torch.stack([p.detach(), 1.1 * p.detach()]) for n, p in net.named_parameters()}

    def loss(module):
        return lambda parameters: functional_call(module, parameters, (x,)).square().sum()

    mine, theirs = (vmap(grad(loss(module)))(stack) for module in (twin, net))
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-3, atol=1e-3)


class Branching(Odd):
    """Looks at a shape, which a trace cannot follow."""

    def forward(self, x):
        if len(x) > 100:
            x = x + 1
        return super().forward(x)


class Dropping(Odd):
    """Computes something else in evaluation."""

    def forward(self, x):
        x = super().forward(x)
        return x if self.training else 2 * x


@pytest.mark.parametrize("kind", [Branching, Dropping])
def test_code_that_cannot_be_traced_keeps_its_sums(kind, calls):
    net, twin, x = plain_and_fused(kind(), images())
    calls.clear()
    for module in (net, twin):
        module.eval()
    torch.testing.assert_close(twin(x), net(x), rtol=1e-4, atol=1e-4)
    assert calls == 7 * [(False, False)]


class Kept(nn.Module):
    """A result has two uses, a sum has a factor: nothing to fuse."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1)
        self.a, self.b = (nn.GroupNorm(2, 6) for _ in range(2))

    def forward(self, x):
        x = self.conv(x)
        twice = self.a(x)
        y = twice.relu() + twice
        return torch.add(y, self.b(y), alpha=2).mean((2, 3))


class Aliased(Kept):
    """What is added in place has two names, of which a trace knows nothing."""

    def forward(self, x):
        y = x = self.conv(x)
        y += self.a(x.clone())
        return (x * self.b(y).relu()).mean((2, 3))


@pytest.mark.parametrize("kind", [Kept, Aliased])
def test_what_must_not_be_fused_is_left_alone(kind, calls):
    net, twin, x = plain_and_fused(kind(), images())
    calls.clear()
    torch.testing.assert_close(twin(x), net(x), rtol=1e-4, atol=1e-4)
    assert calls == 2 * [(False, False)]


def test_hooks_are_called():
    net = Odd().to(DEVICE)
    heard = []
    net.last.register_forward_hook(lambda *_: heard.append(1))
    twin = fused(net, images().to(DEVICE))
    heard.clear()
    twin(images().to(DEVICE))
    assert heard == [1]
    assert type(twin.last) is nn.GroupNorm
    assert type(twin.norm) is FusedNorm


def test_a_layer_with_a_hook_of_its_own_does_not_call_itself():
    norm = FusedNorm(2, 4)
    norm.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(norm(x), F.group_norm(x, 2, norm.weight, norm.bias))


@pytest.mark.parametrize(
    "net", [resnet.ResNet18(4), lenet.LeNet5(10), nn.Linear(3, 2)], ids=["ours", "ours too", "none"]
)
def test_networks_that_gain_nothing_stay_as_they_are(net):
    assert fused(net, torch.randn(2, 3)) is net


def test_a_copy_with_other_numbers_is_not_used(monkeypatch):
    monkeypatch.setattr(norm_fusion, "normalized", lambda norm, x, residual=None, *, relu=False: 1.01 * x)
    net = Odd()
    with pytest.warns(UserWarning, match="one by one: the output would differ"):
        assert fused(net, images()) is net


def test_a_shared_layer_is_fused_where_it_is_used(calls):
    norm = nn.GroupNorm(2, 6)
    net = nn.Sequential(nn.Conv2d(3, 6, 1), norm, nn.ReLU(), norm, nn.Flatten())
    net, twin, x = plain_and_fused(net, images())
    calls.clear()
    torch.testing.assert_close(twin(x), net(x), rtol=1e-4, atol=1e-4)
    assert calls == [(False, True), (False, False)]
    assert copy.deepcopy(twin)(x).equal(twin(x))
