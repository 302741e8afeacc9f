"""GroupNorm with residual and ReLU as one operation: values, gradients, stacks of networks, and the GPU's kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from feddpc.kernels import group_norm
from feddpc.kernels.group_norm import normalized
from feddpc.models.resnet import ResNet18
from support import DEVICE

#: groups, channels and pixels; and whether scales and shifts are learned.
CASES = {
    "resnet": (2, 64, (8, 8), True),
    "odd": (3, 15, (5, 7), True),
    "one pixel": (4, 12, (1, 1), True),
    "no affine": (1, 7, (9, 4), False),
    "a large group": (1, 24, (40, 40), True),
    "many channels": (1, 700, (3, 1), True),
    "one channel in a group": (6, 6, (3, 3), True),
    "a sequence": (2, 10, (11,), True),
    "no pixels": (3, 9, (), True),
}


@pytest.fixture(autouse=True)
def _also_on_a_cpu(monkeypatch):
    monkeypatch.setattr(group_norm, "usable", lambda device: True)


class Block(nn.Module):
    def __init__(self, groups, channels, affine, added, relu):
        super().__init__()
        self.norm, self.added, self.relu = nn.GroupNorm(groups, channels, affine=affine), added, relu
        if affine:
            generator = torch.Generator().manual_seed(1)
            nn.init.uniform_(self.norm.weight, 0.5, 2, generator=generator)
            nn.init.uniform_(self.norm.bias, -1, 1, generator=generator)

    def forward(self, x, residual):
        if x.dtype != torch.float64:
            return normalized(self.norm, x, residual if self.added else None, relu=self.relu)
        y = self.norm(x)
        y = residual + y if self.added else y
        return y.relu() if self.relu else y


def made(case, added, relu, layout=torch.contiguous_format, dtype=torch.float32):
    groups, channels, size, affine = CASES[case]
    block = Block(groups, channels, affine, added, relu).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, channels, *size, generator=generator).to(DEVICE, dtype) + 1 for _ in range(2))
    if len(size) == 2:
        x, residual = x.contiguous(memory_format=layout), residual.contiguous(memory_format=layout)
    return block, x, residual


def close(a, b, error=1e-5):
    a, b = a.detach().double(), b.detach().double()
    torch.testing.assert_close(a, b, rtol=error, atol=error * max(1e-3, float(b.abs().max())))


def exactly(block, x, residual):
    return (
        copy.deepcopy(block).double(),
        x.detach().double().requires_grad_(),
        residual.detach().double().requires_grad_(),
    )


@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_plain_layers(case, layout, added, relu):
    block, x, residual = made(case, added, relu, layout)
    x, residual = x.requires_grad_(), residual.requires_grad_()
    own = block(x, residual)
    if x.ndim == 4:
        assert own.is_contiguous(memory_format=layout)
    exact = exactly(block, x, residual)
    plain = exact[0](*exact[1:])
    close(own, plain)
    slope = torch.randn(own.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    slope = torch.where(plain.detach().abs() < 1e-4, 0.0, slope)  # where rounding decides about a ReLU
    wanted = [x, *([residual] if added else []), *block.parameters()]
    exact_wanted = [exact[1], *([exact[2]] if added else []), *exact[0].parameters()]
    ours = torch.autograd.grad(own, wanted, slope)
    theirs = torch.autograd.grad(plain, exact_wanted, slope.double())
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize("case", ["resnet", "odd", "a large group"])
def test_bfloat16_is_rounded_once(case):
    """The result is the exact one, rounded; statistics are those of float32."""
    block, x, residual = made(case, True, True, dtype=torch.bfloat16)
    exact = exactly(block, x, residual)
    own = block(x, residual)
    assert own.dtype == torch.bfloat16
    close(own, exact[0](*exact[1:]), 2**-8)


@pytest.mark.parametrize("case", ["resnet", "odd", "no affine"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_a_stack_of_networks(case, traced, added):
    """Gradients of all networks at once, also when traced for a compiler."""
    block, x, residual = made(case, added, True)
    x, residual = (torch.stack([t, t * 2, t - 3]) for t in (x, residual))
    stack = {n: torch.stack([p.detach() * s for s in (1, -2, 3)]) for n, p in block.named_parameters()}

    def gradients(module):
        def loss(parameters, x, residual):
            return functional_call(module, parameters, (x, residual)).square().sum()

        return vmap(grad(loss, argnums=(0, 1, 2)))

    program = make_fx(gradients(block))(stack, x, residual) if traced else gradients(block)
    ours = program(stack, x, residual)
    exact = {key: value.double() for key, value in stack.items()}
    theirs = gradients(copy.deepcopy(block).double())(exact, x.double(), residual.double())
    for key in stack:
        close(ours[0][key], theirs[0][key], 1e-4)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        close(a, b, 1e-4)


def test_torch_accepts_the_operations():
    x = torch.randn(2, 3, 6, 4, 4, device=DEVICE)
    weight = torch.rand(2, 6, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.feddpc.group_norm, (x, x + 1, weight, weight, 3, 1e-5, True), test_utils=checks)
    y, mean, inverse = torch.ops.feddpc.group_norm(x, None, weight, weight, 3, 1e-5, True)
    for both in (False, True):
        arguments = (x, x, y, mean, inverse, weight, both)
        torch.library.opcheck(torch.ops.feddpc.group_norm_backward, arguments, test_utils=checks)


@pytest.mark.parametrize("size", [16, 33])
def test_resnet18_is_as_exact_as_with_the_plain_layers(monkeypatch, size):
    """The gradient of the whole network; a ReLU that rounding turns over moves both away from the exact one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = ResNet18(classes=5).to(DEVICE)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)

    def gradient(network, x):
        parts = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
        return torch.cat([part.double().reshape(-1) for part in parts])

    own = gradient(network, x)
    monkeypatch.setattr(group_norm, "fits", lambda x: False)
    plain, exact = gradient(network, x), gradient(copy.deepcopy(network).double(), x.double())
    assert (own - exact).norm() < 1e-5 * exact.norm() + 10 * (plain - exact).norm()
