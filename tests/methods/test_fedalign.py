"""FedAlign: the stretch of a stage against linear algebra and plain formulas, when it is FedAvg, what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from feddpc.methods.base import ClientContext
from feddpc.methods.fedalign import FedAlign, stretch
from feddpc.models import MLP, LeNet5, ResNet18, SmallCNN, seeded
from feddpc.tasks.base import BatchIndices, by_autograd, by_transform
from support import run_rounds, small_setting

ENGINES = pytest.mark.parametrize(
    "engine", [Loop(), Stacked(), Stacked(narrow=False)], ids=["loop", "narrow", "masked"]
)


def small_cnn():
    return SmallCNN(3, 1, 6, width=4)


class Normed(SmallCNN):
    """With a GroupNorm in the last stage, and a pool, so that its output is smaller than its input."""

    stage = slice(3, 7)

    def __init__(self):
        super().__init__(3, 1, 6, width=4)
        self.body = nn.Sequential(*self.body[:4], nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def federation(net=small_cnn, **values):
    base = small_setting(**values)
    return build(base.config, data=base.data, module=seeded(net, 0), partition=base.partition)


def literal(f_in, f_out):
    """The formulas as they stand, with T and K formed."""
    if f_in.shape[2] > f_out.shape[2]:
        f_in = F.adaptive_avg_pool2d(f_in, f_out.shape[2:])
    a, b = f_in.flatten(2), f_out.flatten(2)
    t = torch.bmm(a, b.transpose(1, 2)) / a.shape[2]
    k = torch.bmm(t, t.transpose(1, 2))
    v = torch.ones(len(k), k.shape[1], 1, dtype=k.dtype)
    for _ in range(10):
        m = torch.bmm(k, v)
        n = m.norm(dim=1, keepdim=True)
        v = m / n
    return (n / v.norm(dim=1, keepdim=True)).sqrt().flatten()


@pytest.mark.parametrize(("places", "c_in"), [(1, 5), (4, 3), (4, 4), (3, 7)])
def test_stretch_is_the_largest_singular_value(places, c_in):
    """Positive maps have a top eigenvalue far above the others, so that ten iterations are plenty."""
    generator = torch.Generator().manual_seed(0)
    f_in = 1 + torch.rand(6, c_in, places, generator=generator, dtype=torch.float64)
    f_out = 1 + torch.rand(6, 8, places, generator=generator, dtype=torch.float64)
    t = f_in @ f_out.mT / places
    values = torch.linalg.eigvalsh(t @ t.mT)
    if values.shape[1] > 1:
        assert float((values[:, -2] / values[:, -1]).max()) < 0.05
    torch.testing.assert_close(stretch(f_in, f_out), values[:, -1].sqrt(), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("into", "out"),
    [((6, 14, 14), (16, 10, 10)), ((256, 2, 2), (512, 1, 1)), ((16, 4, 4), (32, 4, 4)), ((8, 3, 3), (5, 2, 2))],
)
def test_stretch_is_what_the_formulas_say(into, out):
    f_in, f_out = (torch.randn(3, *shape, dtype=torch.float64) for shape in (into, out))
    torch.testing.assert_close(stretch(f_in, f_out), literal(f_in, f_out), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("places", [1, 9])
def test_dead_maps_have_no_stretch_and_no_gradient(a, b, places):
    f_in = torch.full((2, 4, places), a)
    f_out = torch.full((2, 3, places), b, requires_grad=True)
    value = stretch(f_in, f_out)
    assert value.tolist() == [0, 0]
    value.sum().backward()
    assert float(f_out.grad.abs().max()) == 0


def here(w):
    return ClientContext(w, {}, {}, 0.05, torch.tensor(1.0))


@pytest.mark.parametrize("differentiate", [by_autograd, by_transform])
@pytest.mark.parametrize("net", [small_cnn, Normed, lambda: MLP(3, 1, 6, hidden=(9, 8))], ids=["cnn", "normed", "mlp"])
def test_the_step_is_that_of_two_backward_passes(net, differentiate):
    """Backward of CE, then of mu (CE / L) L with the ratio as a number, gradients added up, as the authors do it."""
    setting = federation(net)
    task, batch = setting.task, setting.task.fetch(BatchIndices(torch.tensor([3, 14, 15, 9, 26])))
    twin = net().double()
    twin.load_state_dict(setting.task.flat.state_dict(setting.w0))
    h = twin.trunk(batch.x)
    o = twin.last_stage(h)
    ce = F.cross_entropy(twin.top(o), batch.y)
    ce.backward(retain_graph=True)
    narrow = twin.last_stage(h.detach(), 0.5)

    def maps(f):
        return f.detach() if f.ndim == 4 else f.detach()[:, :, None, None]

    narrow = narrow if narrow.ndim == 4 else narrow[:, :, None, None]
    first = maps(h)[:, : round(h.shape[1] * 0.5)]
    loss = F.mse_loss(literal(first, narrow), literal(maps(h), maps(o)))
    (0.45 * (ce.item() / loss.item()) * loss).backward()
    want = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    method = FedAlign(omega=0.5)
    value, g = differentiate(lambda at: method.objective(task, at, batch, here(setting.w0)), setting.w0)
    torch.testing.assert_close(g, want, rtol=0, atol=1e-10)
    assert float(value) == pytest.approx(1.45 * ce.item(), abs=1e-12)
    _, plain = differentiate(lambda at: task.loss(at, batch), setting.w0)
    assert float((g - plain).norm()) > 1e-3


@ENGINES
@pytest.mark.parametrize("method", [FedAlign(mu=0.0), FedAlign(omega=1.0)], ids=["mu 0", "omega 1"])
def test_without_weight_or_at_full_width_it_is_fedavg(method, engine):
    setting = federation()
    a, b = (run_rounds(setting, m, engine, 3)[0].w for m in (method, methods.create("fedavg")))
    assert torch.equal(a, b)


@pytest.mark.parametrize("net", [small_cnn, LeNet5, lambda: ResNet18(groups=4)])
def test_at_full_width_the_two_stretches_are_the_same(net):
    module = seeded(net, 0).double()
    size, channels = (6, 1) if isinstance(module, SmallCNN) else (32, 3)
    h = module.trunk(torch.randn(4, channels, size, size, dtype=torch.float64))
    assert torch.equal(stretch(h, module.last_stage(h, 1.0)), stretch(h, module.last_stage(h)))


def test_stretches_that_agree_to_rounding_count_as_the_same():
    """Where rounding makes L 1e-32 instead of 0, CE / L must not make steps of it."""

    class Wobbly(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(36, 1), nn.Linear(1, 6), nn.Linear(6, 3)

        def trunk(self, x):
            return self.one(x.flatten(1)).square()

        def last_stage(self, h, width=1.0):
            return self.two(h).square() * (1 if width == 1 else 1 + 4e-15)

        def top(self, o):
            return self.head(o)

        def forward(self, x):
            return self.top(self.last_stage(self.trunk(x)))

    setting = federation(Wobbly)
    task, batch = setting.task, setting.task.fetch(BatchIndices(torch.arange(5)))
    value, g = by_autograd(lambda at: FedAlign().objective(task, at, batch, here(at)), setting.w0)
    loss, plain = by_autograd(lambda at: task.loss(at, batch), setting.w0)
    torch.testing.assert_close((value, g), (loss, plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("differentiate", [by_autograd, by_transform])
def test_dead_features_leave_the_cross_entropy_alone(differentiate):
    """All maps zero: L = 0, CE / L is no number, and neither value nor gradient may notice."""
    setting = federation()
    task, batch = setting.task, setting.task.fetch(BatchIndices(torch.tensor([3, 14, 15])))
    for dead in ("body.0", "body.3"):
        parameters = setting.task.flat.state_dict(setting.w0)
        parameters[f"{dead}.weight"].zero_()
        parameters[f"{dead}.bias"].fill_(-1.0)
        w = torch.cat([p.reshape(-1) for p in parameters.values()])
        value, g = differentiate(lambda at: FedAlign().objective(task, at, batch, here(at)), w)
        loss, plain = differentiate(lambda at: task.loss(at, batch), w)
        torch.testing.assert_close((value, g), (loss, plain), rtol=0, atol=1e-14)


def test_padding_changes_nothing():
    setting = federation()
    task, method = setting.task, FedAlign()
    rows = [
        BatchIndices(torch.tensor([4, 7, 9])),
        BatchIndices(torch.tensor([4, 7, 9, 0, 0]), torch.tensor([1, 1, 1, 0, 0])),
    ]
    rows.append(BatchIndices(torch.tensor([0, 0]), torch.tensor([0, 0])))
    a, b, empty = (
        by_autograd(lambda at, r=r: method.objective(task, at, task.fetch(r), here(at)), setting.w0) for r in rows
    )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert (float(empty[0]), float(empty[1].norm())) == (0, 0)


@pytest.mark.parametrize("engine", [Stacked(), Stacked(narrow=False)], ids=["narrow", "masked"])
@pytest.mark.parametrize("net", [small_cnn, Normed, lambda: MLP(3, 1, 6, hidden=(9,))], ids=["cnn", "normed", "mlp"])
def test_engines_agree(engine, net):
    setting, method = federation(net, lr=0.01), FedAlign(omega=0.5, mu=0.1)
    (a, left), (b, right) = (run_rounds(setting, method, e, 3) for e in (Loop(), engine))
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    assert [r.train_loss for r in left] == pytest.approx([r.train_loss for r in right], abs=1e-10)
    fedavg, _ = run_rounds(setting, methods.create("fedavg"), Loop(), 3)
    assert float((a.w - fedavg.w).norm()) > 1e-4


@pytest.mark.parametrize(
    ("method", "net", "message"),
    [
        (
            FedAlign(),
            nn.Linear(4, 2),
            "FedAlign needs trunk, but this model defines none: give it a trunk() method or choose another method",
        ),
        (
            FedAlign(),
            MLP(3, 1, 6, hidden=()),
            "FedAlign needs trunk, but this model defines none: give it a trunk() method or choose another method",
        ),
        (
            FedAlign(omega=0.1),
            Normed(),
            "fedalign: omega = 0.1: the 2 groups of layer 'body.4' do not divide its reduced width, 1 of 8 channels: "
            "choose another omega or number of groups",
        ),
    ],
)
def test_refusals(method, net, message):
    with pytest.raises(BadInputError) as error:
        method.adapt(net)
    assert str(error.value) == message


def test_networks_of_ones_own_need_only_the_parts():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(36, 8), nn.Linear(8, 6), nn.Linear(6, 3)

        def trunk(self, x):
            return self.one(x.flatten(1)).relu()

        def last_stage(self, h, width=1.0):
            i, o = round(8 * width), round(6 * width)
            return F.linear(h[:, :i], self.two.weight[:o, :i], self.two.bias[:o]).relu()

        def top(self, o):
            return self.head(o)

        def forward(self, x):
            return self.top(self.last_stage(self.trunk(x)))

    method = FedAlign(omega=0.5)
    setting = federation(lambda: method.adapt(Own()), lr=0.01)
    a, b = (run_rounds(setting, method, e, 2)[0].w for e in (Loop(), Stacked()))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("hyper", [{"mu": -0.1}, {"omega": 0.0}, {"omega": 1.1}])
def test_domains(hyper):
    with pytest.raises(BadInputError, match=f"fedalign: {next(iter(hyper))} = "):
        FedAlign(**hyper)


def test_stretch_of_high_rank_does_not_vanish_in_float32():
    """A flat spectrum of rank 400: each iteration divides by 400, and the square must not underflow."""
    f_in = torch.eye(400)[None]
    f_out = torch.eye(400)[None]
    torch.testing.assert_close(stretch(f_in, f_out), torch.tensor([1 / 400]), rtol=1e-5, atol=0)
