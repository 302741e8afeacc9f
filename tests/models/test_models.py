"""Models: the published sizes, the split in features and head, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from feddpc import models
from feddpc.data import Dataset
from feddpc.errors import BadInputError
from feddpc.models import LeNet5, ResNet18, check_supported, seeded, to_groupnorm


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def macs(model, size):
    """Multiply-accumulates of convolutions and linear layers for one image, counted on shapes without computing."""
    total = 0

    def count(module, _, out):
        nonlocal total
        total += module.weight[0].numel() * out.numel()

    for m in model.modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            m.register_forward_hook(count)
    model(torch.zeros(1, 3, size, size, device="meta"))
    return total


@pytest.mark.parametrize(("variant", "expected"), [("A", 62_006), ("B", 797_962)])
def test_lenet_has_the_published_size(variant, expected):
    assert parameters(LeNet5(variant=variant)) == expected


@pytest.mark.parametrize(("channels", "size", "expected"), [(1, 28, 1_663_370), (3, 32, 2_156_490)])
def test_mcmahans_cnn_has_the_published_size(channels, size, expected):
    by_hand = (25 * channels + 1) * 32 + (25 * 32 + 1) * 64 + (64 * (size // 4) ** 2 + 1) * 512 + 513 * 10
    assert parameters(models.McMahanCNN(10, channels, size)) == by_hand == expected


@pytest.mark.parametrize(
    ("stem", "classes", "expected"),
    [("7x7", 100, 11_227_812), ("7x7", 200, 11_279_112), ("3x3", 100, 11_220_132), ("3x3", 200, 11_271_432)],
)
def test_resnet_has_the_published_size(stem, classes, expected):
    assert parameters(ResNet18(classes=classes, stem=stem)) == expected


@pytest.mark.parametrize(
    ("stem", "size", "classes", "expected"),
    [("7x7", 32, 100, 37.1), ("3x3", 32, 100, 555.5), ("7x7", 64, 200, 148.1), ("3x3", 64, 200, 2221.8)],
)
def test_resnet_does_the_published_work(stem, size, classes, expected):
    with torch.device("meta"):
        model = ResNet18(classes=classes, size=size, stem=stem)
    assert round(macs(model, size) / 1e6, 1) == expected


@pytest.mark.parametrize(
    ("name", "channels", "size", "options"),
    [
        ("lenet5", 3, 32, {}),
        ("lenet5", 1, 28, {"variant": "B"}),
        ("lenet5", 1, 16, {}),
        ("resnet18", 3, 32, {}),
        ("resnet18", 1, 8, {"stem": "3x3", "groups": 32}),
        ("cnn", 1, 8, {}),
        ("cnn", 3, 33, {"width": 4}),
        ("mcmahan-cnn", 1, 28, {}),
        ("mcmahan-cnn", 3, 32, {}),
        ("mlp", 3, 5, {"hidden": (7, 6)}),
        ("mlp", 4, 1, {"hidden": []}),
    ],
)
def test_forward_is_head_of_features(name, channels, size, options):
    model = models.make(name, classes=5, channels=channels, size=size, **options)
    x = torch.randn(3, channels, size, size)
    out = model(x)
    assert out.shape == (3, 5)
    assert torch.equal(out, model.head(model.features(x)))
    assert isinstance(model.head, nn.Linear)
    assert list(model.buffers()) == []
    check_supported(model)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_sample_does_not_see_the_rest_of_its_batch():
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model = seeded(ResNet18, 0).double()
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-10)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lenet", {}, "did you mean 'lenet5'"),
        ("lenet5", {"size": 15}, "smallest image is 16x16"),
        ("lenet5", {"variant": "C"}, "Valid: A, B"),
        ("resnet18", {"stem": "5x5"}, "Valid: 3x3, 7x7"),
        ("resnet18", {"groups": 3}, "groups = 3"),
        ("resnet18", {"init": "keras"}, "Valid: torch, torchvision"),
        ("resnet18", {"group": 2}, "did you mean 'groups'"),
        ("cnn", {"size": 3}, "smallest image is 4x4"),
        ("cnn", {"width": 0}, "width = 0"),
        ("mcmahan-cnn", {"size": 3}, "smallest image is 4x4"),
        ("mcmahan-cnn", {"width": 3}, "no options"),
        ("transformer", {}, "needs vocabulary"),
        ("mlp", {"hidden": 64}, "hidden = 64"),
        ("mlp", {"hidden": [64, -1]}, "hidden = -1"),
        ("mlp", {"classes": 0}, "classes = 0"),
        ("mlp", {"channels": 1.5}, "channels = 1.5"),
    ],
)
def test_bad_requests_are_named(name, change, message):
    with pytest.raises(BadInputError, match=message):
        models.make(name, **({"classes": 10, "channels": 3, "size": 32} | change))


def test_resnet18_starts_as_either_library_does():
    """torch: uniform within 1 / sqrt(fan-in). torchvision: normal, variance 2 / fan-out. All else starts alike."""
    shape = {"classes": 5, "channels": 3, "size": 32}
    own, usual = (seeded(lambda i=i: models.make("resnet18", **shape, init=i), 0) for i in ("torch", "torchvision"))
    for a, b in zip(own.modules(), usual.modules(), strict=True):
        if not isinstance(a, nn.Conv2d):
            continue
        fan_in, fan_out = (n * a.kernel_size[0] ** 2 for n in (a.in_channels, a.out_channels))
        assert float(a.weight.detach().abs().max()) <= fan_in**-0.5
        assert float(a.weight.detach().var()) == pytest.approx(1 / (3 * fan_in), rel=0.05)
        assert float(b.weight.detach().var()) == pytest.approx(2 / fan_out, rel=0.05)
    plain = seeded(lambda: models.make("resnet18", **shape), 0).state_dict()
    assert all(torch.equal(value, plain[key]) for key, value in usual.state_dict().items())


def test_options_and_defaults():
    assert {n: models.options(n) for n in models.names()} == {
        "lenet5": {"variant": "A"},
        "resnet18": {"stem": "7x7", "groups": 2, "init": "torchvision"},
        "cnn": {"width": 16},
        "mcmahan-cnn": {},
        "mlp": {"hidden": (64,)},
        "lstm": {"embedding": 8, "hidden": 256, "layers": 2},
        "transformer": {"width": 64, "heads": 4, "layers": 2},
    }
    for classes, channels, size in [(100, 3, 32), (100, 1, 28), (10, 3, 64), (10, 1, 8), (100, 1, 16), (2, 30, 1)]:
        name = models.default_for(classes=classes, size=size)
        models.make(name, classes=classes, channels=channels, size=size)


def test_seeded_repeats_and_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a, b, c = seeded(LeNet5, 1), seeded(LeNet5, 1), seeded(LeNet5, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)
    with torch.device("meta"):
        assert torch.equal(seeded(LeNet5, 1).head.weight, a.head.weight)


def test_resnet_starts_with_variance_two_over_fan_out():
    model = seeded(ResNet18, 0)
    weight = model.stages[-1].body[3].weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


class Nested(nn.Module):
    """BatchNorm of every kind, deep, shared and frozen."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3))
        shared = nn.BatchNorm1d(6)
        self.first, self.second = shared, shared
        self.deep = nn.ModuleDict({"inner": nn.Sequential(nn.BatchNorm3d(4, affine=False))})


def test_to_groupnorm_converts_a_copy_and_keeps_scale_and_shift():
    net = Nested().double().eval()
    nn.init.normal_(net.conv[1].weight)
    net.conv[1].bias.requires_grad_(False)
    out = to_groupnorm(net, groups=2)
    assert isinstance(net.conv[1], nn.BatchNorm2d)
    kinds = [type(m) for m in out.modules()]
    assert kinds.count(nn.GroupNorm) == 3
    assert not any(issubclass(k, nn.modules.batchnorm._BatchNorm) for k in kinds)
    norm = out.conv[1]
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.training) == (2, 8, 1e-3, False)
    assert torch.equal(norm.weight, net.conv[1].weight)
    assert norm.weight is not net.conv[1].weight
    assert norm.weight.dtype == torch.float64
    assert not norm.bias.requires_grad
    assert out.first is out.second
    assert out.deep["inner"][0].weight is None
    check_supported(out)
    assert isinstance(to_groupnorm(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_groups_must_divide_the_channels_of_the_named_layer():
    with pytest.raises(BadInputError, match=r"groups = 4 does not divide the 6 channels of layer 'first'"):
        to_groupnorm(Nested(), groups=4)
    with pytest.raises(BadInputError, match=r"layer 'model\.norm'"):
        to_groupnorm(nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.BatchNorm1d(3)})}))
    with pytest.raises(BadInputError, match="the model itself"):
        to_groupnorm(nn.BatchNorm1d(3))
    with pytest.raises(BadInputError, match="groups = 0"):
        to_groupnorm(Nested(), groups=0)


def test_unsupported_models_are_refused_with_the_remedy():
    with pytest.raises(BadInputError, match=r"layer 'conv\.1' is a BatchNorm2d.*feddpc\.models\.to_groupnorm"):
        check_supported(Nested(), statistics=False)
    check_supported(Nested())
    check_supported(nn.InstanceNorm2d(2, affine=True), statistics=False)
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("mask", torch.ones(2))  # a constant, as far as can be seen
    check_supported(buffered, statistics=False)
    with pytest.raises(BadInputError, match="no trainable parameter"):
        check_supported(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(BadInputError, match="no trainable parameter"):
        check_supported(nn.ReLU())


def test_models_learn_something():
    torch.manual_seed(0)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 1, 8, 8))).float()
    y = (x.mean((1, 2, 3)) > 0).long()
    for name in ("cnn", "mlp"):
        model = seeded(lambda name=name: models.make(name, classes=2, channels=1, size=8), 0)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(80):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        assert (model(x).argmax(1) == y).float().mean() > 0.95


KERNELS = [(3, 1, 1), (3, 2, 1), (1, 2, 0), (1, 1, 0), (3, 1, 2), (2, 2, 0)]


def same_maps(layer, own, plain, x):
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-13)
    wanted = [x, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in (own, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), KERNELS)
def test_a_kernel_that_lies_on_a_map_once_is_a_product(shape, kernel, stride, padding):
    from feddpc.models.resnet import Convolution

    if any(n + 2 * padding < kernel for n in shape):
        return
    layer = Convolution(3, 4, kernel, stride, padding).double()
    x = torch.randn(5, 3, *shape, dtype=torch.float64, requires_grad=True)
    same_maps(layer, layer(x), torch.nn.Conv2d.forward(layer, x), x)


@pytest.mark.parametrize(("kernel", "size"), [(7, (8, 6)), (3, (4, 4)), (7, (2, 2)), ((3, 7), (6, 8))])
def test_a_convolution_that_halves_is_one_of_blocks(kernel, size):
    from feddpc.models.resnet import Halving

    padding = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
    layer = Halving(3, 4, kernel, 2, padding).double()
    x = torch.randn(5, 3, *size, dtype=torch.float64, requires_grad=True)
    assert layer.fits(x)
    same_maps(layer, layer.by_blocks(x), torch.nn.Conv2d.forward(layer, x), x)


@pytest.mark.parametrize(
    ("arguments", "size"), [((3, 4, 7, 2, 3), 9), ((3, 4, 5, 2, 2), 8), ((3, 4, 7, 1, 3), 8), ((5, 4, 7, 2, 3), 8)]
)
def test_other_convolutions_are_not_made_of_blocks(arguments, size):
    from feddpc.models.resnet import Halving

    assert not Halving(*arguments).fits(torch.zeros(1, arguments[0], size, size))


def test_tokens_have_no_default_model():
    x, y = np.array([[1, 2], [3, 4]]), [0, 1]
    with pytest.raises(BadInputError, match="tokens"):
        models.default_name(Dataset.from_arrays(x, y, x, y))


FLOATS, TOKENS = np.zeros((3, 5), np.float32), np.array([[0, 1, 2, 3], [4, 5, 6, 6]])


@pytest.mark.parametrize(
    ("x", "y", "target", "shape"),
    [
        (FLOATS, [0, 1, 2], "classes", (3, 3)),
        (FLOATS, [0.5, 1.5, 2.5], "floats", (3, 1)),
        (FLOATS, np.zeros((3, 4)), "floats", (3, 4)),
        (FLOATS, np.eye(3), "multihot", (3, 3)),
    ],
)
def test_tables_take_the_mlp_whatever_the_target(x, y, target, shape):
    data = Dataset.from_arrays(x, y, x, y, target=target)
    assert models.default_name(data) == "mlp"
    assert models.make_for(data, "mlp", {}, 0)(torch.from_numpy(x)).shape == shape


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_tokens_take_models_for_text(name):
    data = Dataset.from_arrays(TOKENS, TOKENS, TOKENS, TOKENS, classes=9)
    assert models.default_name(data) == "transformer"
    net = models.make_for(data, name, {}, 0)
    check_supported(net)
    assert net(torch.from_numpy(TOKENS)).shape == (2, 4, 9)
    with pytest.raises(BadInputError, match="transformer"):
        models.make_for(data, "mlp", {}, 0)
    table = Dataset.from_arrays(FLOATS, [0, 1, 2], FLOATS, [0, 1, 2])
    with pytest.raises(BadInputError, match=name):
        models.make_for(table, name, {}, 0)


def test_own_models_may_ask_for_outputs_and_vocabulary(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\n\n\ndef net(outputs, vocabulary):\n"
        "    return nn.Sequential(nn.Embedding(vocabulary, 3), nn.Flatten(), nn.Linear(12, outputs))\n"
    )
    data = Dataset.from_arrays(TOKENS, [0, 1], TOKENS, [0, 1])
    assert models.make_for(data, f"{file}:net", {}, 0)(torch.from_numpy(TOKENS)).shape == (2, 2)


def test_bytes_that_are_no_images_take_the_mlp():
    x, y = np.zeros((2, 25), np.uint8), [0.5, 1.5]
    data = Dataset.from_arrays(x, y, x, y)
    assert models.default_name(data) == "mlp"
    assert models.make_for(data, "mlp", {}, 0)(torch.zeros(3, 25)).shape == (3, 1)
    with pytest.raises(BadInputError, match="square images"):
        models.make_for(data, "cnn", {}, 0)
