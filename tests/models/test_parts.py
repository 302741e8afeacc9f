"""Trunk, last stage and top of a network; a last stage with only some of its channels; layers that methods add."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpc import models
from feddpc.errors import BadInputError
from feddpc.models import LeNet5, ResNet18, SmallCNN, seeded
from feddpc.models.flat import Flat
from feddpc.models.heads import WithProjection, WithProjector
from feddpc.models.narrow import narrowed, reduced

NETWORKS = pytest.mark.parametrize(
    ("name", "channels", "size", "options", "inner"),
    [
        ("lenet5", 3, 32, {}, (16, 10, 10)),
        ("lenet5", 1, 28, {"variant": "B"}, (64, 8, 8)),
        ("resnet18", 3, 32, {}, (512, 1, 1)),
        ("resnet18", 1, 16, {"stem": "3x3", "groups": 32}, (512, 2, 2)),
        ("cnn", 1, 8, {}, (32, 4, 4)),
        ("mcmahan-cnn", 1, 28, {}, (64, 14, 14)),
        ("mlp", 3, 5, {"hidden": (7, 6)}, (6,)),
        ("mlp", 3, 5, {}, (64,)),
    ],
)


@NETWORKS
def test_forward_is_top_of_last_stage_of_trunk(name, channels, size, options, inner):
    net = models.make(name, classes=5, channels=channels, size=size, **options)
    x = torch.randn(3, channels, size, size)
    o = net.last_stage(net.trunk(x))
    assert o.shape == (3, *inner)
    assert float(o.detach().min()) >= 0
    assert torch.equal(net.top(o), net(x))


@NETWORKS
def test_the_full_width_is_the_stage_itself(name, channels, size, options, inner):
    """By slices of all channels too, not only by the way around them."""
    net = models.make(name, classes=5, channels=channels, size=size, **options).double()
    h = net.trunk(torch.randn(3, channels, size, size, dtype=torch.float64))
    out = h
    for layer in net.sections().stage:
        out = narrowed(layer, out, 1.0)
    torch.testing.assert_close(out, net.last_stage(h), rtol=0, atol=1e-12)
    assert torch.equal(net.last_stage(h, 1.0), net.last_stage(h))


@NETWORKS
def test_a_narrow_stage_uses_the_first_channels_only(name, channels, size, options, inner):
    net = models.make(name, classes=5, channels=channels, size=size, **options)
    h = net.trunk(torch.randn(3, channels, size, size)).detach()
    out = net.last_stage(h, 0.25)
    assert out.shape == (3, reduced(inner[0], 0.25), *inner[1:])
    kept = reduced(h.shape[1], 0.25)
    other = torch.cat([h[:, :kept], torch.randn_like(h[:, kept:])], 1)
    assert torch.equal(net.last_stage(other, 0.25), out)
    out.sum().backward()
    touched = {n for n, p in net.named_parameters() if p.grad is not None}
    inside = {id(p) for layer in net.sections().stage for p in layer.parameters()}
    assert touched == {n for n, p in net.named_parameters() if id(p) in inside}


def test_a_narrow_convolution_is_a_smaller_convolution():
    conv = nn.Conv2d(8, 12, 3, stride=2, padding=1)
    small = nn.Conv2d(4, 6, 3, stride=2, padding=1)
    small.load_state_dict({"weight": conv.weight[:6, :4], "bias": conv.bias[:6]})
    h = torch.randn(2, 4, 7, 7)
    assert torch.equal(narrowed(conv, h, 0.5), small(h))
    net = SmallCNN(3, 1, 8, width=8)
    h = torch.randn(2, 8, 4, 4)
    by_hand = F.conv2d(h[:, :2], net.body[3].weight[:4, :2], net.body[3].bias[:4], padding=1).relu()
    assert torch.equal(net.last_stage(h, 0.25), by_hand)


def test_a_narrow_residual_block_is_a_smaller_block():
    """The last stage of a ResNet18 whose every layer is a quarter as wide, with the first weights of the wide one."""
    net = seeded(lambda: ResNet18(classes=5, groups=4), 0)
    small = nn.ModuleList(type(net.stages[-1])(*widths, 4) for widths in ((64, 128), (128, 128)))
    for wide, block in zip(net.stages[-2:], small, strict=True):
        for (n, p), (m, q) in zip(wide.named_parameters(), block.named_parameters(), strict=True):
            assert n == m
            q.data = p.data[tuple(slice(k) for k in q.shape)].clone()
    h = torch.randn(2, 256, 4, 4)
    out = h[:, :64]
    for block in small:
        out = block(out)
    torch.testing.assert_close(net.last_stage(h, 0.25), out)


def test_group_norm_keeps_its_groups():
    norm = nn.GroupNorm(2, 8, eps=1e-3)
    nn.init.normal_(norm.weight)
    h = torch.randn(3, 4, 5, 5)
    assert torch.equal(narrowed(norm, h, 0.5), F.group_norm(h, 2, norm.weight[:4], norm.bias[:4], 1e-3))
    assert narrowed(nn.GroupNorm(2, 8, affine=False), h, 0.5).shape == h.shape


@pytest.mark.parametrize(("channels", "width", "left"), [(512, 0.25, 128), (6, 0.25, 2), (2, 0.1, 1), (16, 1.0, 16)])
def test_reduced_widths(channels, width, left):
    assert reduced(channels, width) == left


def test_layers_without_a_reduced_width_are_named():
    with pytest.raises(BadInputError, match=r"a Flatten has no reduced width.*narrowed\(h, width\)"):
        narrowed(nn.Sequential(nn.ReLU(), nn.Flatten()), torch.zeros(1, 2), 0.5)
    with pytest.raises(BadInputError, match="a Conv2d has no reduced width"):
        narrowed(nn.Conv2d(4, 4, 3, groups=2), torch.zeros(1, 2, 3, 3), 0.5)


def test_too_narrow_for_its_groups():
    assert ResNet18(classes=3, groups=32).too_narrow(0.25) is None
    assert ResNet18(classes=3, groups=2).too_narrow(1.0) is None
    assert LeNet5().too_narrow(0.1) is None
    why = ResNet18(classes=3, groups=32).too_narrow(0.1)
    assert why == ("the 32 groups of layer 'stages.6.body.1' do not divide its reduced width, 51 of 512 channels")


def test_parts_work_on_a_vector():
    """Functionally, with parameters other than the module's own, and vectorised over clients."""
    net = SmallCNN(3, 1, 8, width=4).double()
    flat = Flat(net)
    x = torch.randn(2, 5, 1, 8, 8, dtype=torch.float64)
    w = torch.stack([flat.vector(), 2 * flat.vector()])

    def narrow(w, x):
        return flat.part(w, "last_stage", flat.part(w, "trunk", x), 0.5)

    both = torch.func.vmap(narrow)(w, x)
    assert both.shape == (2, 5, 4, 4, 4)
    torch.testing.assert_close(both[0], net.last_stage(net.trunk(x[0]), 0.5), rtol=0, atol=1e-12)
    torch.testing.assert_close(both[1], narrow(w[1], x[1]), rtol=0, atol=1e-12)
    at_once = flat.part(w[1], lambda net, x: net.last_stage(net.trunk(x), 0.5), x[1])
    assert torch.equal(at_once, narrow(w[1], x[1]))


class Alias(nn.Module):
    """A network of one's own whose head has another name too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU())
        self.classifier = nn.Linear(6, 3)

    @property
    def head(self):
        return self.classifier

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.features(x))


@pytest.mark.parametrize("build", [lambda: SmallCNN(3, 1, 4, width=3), Alias])
def test_projection_replaces_the_head(build):
    base = build()
    x = torch.randn(2, 1, 4, 4)
    features = base.features(x)
    net = WithProjection(base, 5)
    assert [n for n, _ in net.named_parameters() if not n.startswith("base.body")] == [
        *("projection.0.weight", "projection.0.bias", "projection.2.weight", "projection.2.bias"),
        *("head.weight", "head.bias"),
    ]
    z, logits = net.projections_and_logits(x)
    assert (z.shape, logits.shape) == ((2, 5), (2, 3))
    assert torch.equal(net.features(x), features)
    assert torch.equal(net.project(x), z)
    assert torch.equal(net(x), logits)
    assert torch.equal(net.head(z), logits)
    assert net.projection[0].weight.shape == (6, 6)
    models.check_supported(net)


@pytest.mark.parametrize("build", [lambda: SmallCNN(3, 1, 4, width=3), Alias])
def test_projector_stands_beside_the_head(build):
    base = build()
    x = torch.randn(2, 1, 4, 4)
    before = base(x)
    net = WithProjector(base)
    assert torch.equal(net(x), before)
    f, logits = net.features_and_logits(x)
    assert torch.equal(f, net.features(x))
    assert torch.equal(logits, before)
    assert net.project(f).shape == f.shape
    assert [tuple(p.shape) for p in net.projector.parameters() if p.ndim == 2] == [(12, 6), (12, 12), (6, 12)]
    mask = Flat(net).mask("projector")
    assert int(mask.sum()) == sum(p.numel() for p in net.projector.parameters())
