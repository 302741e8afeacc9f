"""FedBR: one step as separate modules and optimisers make it, who is moved by which half, pseudo-data, FedAvg."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from feddpc.methods.base import ClientContext
from feddpc.methods.fedbr import FedBR
from feddpc.methods.federated_data import FederatedData
from feddpc.models import SmallCNN, seeded
from feddpc.tasks.base import BatchIndices
from support import run_rounds, small_setting

ENGINES = pytest.mark.parametrize(
    "engine", [Loop(), Stacked(), Stacked(narrow=False)], ids=["loop", "narrow", "masked"]
)
VARIANTS = pytest.mark.parametrize(
    "method",
    [FedBR(pseudo=5), FedBR(pseudo=3, lam=0.3, t1=1.0, t2=3.0, mixture=True), FedBR(pseudo=5, lam=0.0)],
    ids=["plain", "mixture", "no lam"],
)


def world_of(setting):
    return FederatedData(setting.data, setting.partition, 0, 0.05, 4, torch.device(setting.w0.device))


def adapted(method, **values):
    """The small federation with the method's network, and its pseudo-data in everybody's hands."""
    base = small_setting(**values)
    net = seeded(lambda: method.adapt(SmallCNN(3, 1, 6, width=4)), 0)
    setting = build(base.config, data=base.data, module=net, partition=base.partition)
    world = world_of(setting)
    payload = dict(method.extend_data(world, method.learn(world)).one_time_payload)
    return replace(setting, one_time_payload=payload)


def away_from(w, seed=1):
    return w + 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)


def local(setting, w=None, lr=0.05):
    return ClientContext(setting.w0 if w is None else w, setting.one_time_payload, {}, lr, torch.tensor(1.0))


def by_hand(method, setting, w, y, x, labels, lr, steps):
    """Separate networks, exp and log, one optimiser each for the projector and for the rest, as in the public code."""
    net, server = (method.adapt(SmallCNN(3, 1, 6, width=4)).double() for _ in range(2))
    net.load_state_dict(setting.task.flat.state_dict(y))
    server.load_state_dict(setting.task.flat.state_dict(w))
    of_p = torch.optim.SGD(net.projector.parameters(), lr=lr)
    of_rest = torch.optim.SGD(net.base.parameters(), lr=lr)
    x_p = (setting.one_time_payload["x_p"].double() - 127.5) / 127.5
    q = torch.full((len(x_p), 3), 1 / 3, dtype=torch.float64)
    pairs = [i % len(x) for i in range(len(x_p))]
    if method.mixture:
        x_p = torch.stack([(p + x[j]) / 2 for p, j in zip(x_p, pairs, strict=True)])
        q = torch.stack([(p + F.one_hot(labels[j], 3)) / 2 for p, j in zip(q, pairs, strict=True)])
    z_g = server.features(x_p).detach()

    def log_ratio(z_p, z):
        one, two, three = (net.projector(v) for v in (z_p, z_g, z[pairs]))
        pull = torch.exp(method.t1 * torch.cosine_similarity(one, two, dim=1))
        push = torch.exp(method.t2 * torch.cosine_similarity(one, three, dim=1))
        return torch.log(pull / (pull + push)).sum() / len(z_p)

    for _ in range(steps):
        z_p, z = net.features(x_p), net.features(x)
        if method.mu:
            of_p.zero_grad()
            log_ratio(z_p.detach(), z.detach()).backward()
            of_p.step()
        ce = -(F.log_softmax(net.base.head(z), 1) * F.one_hot(labels, 3)).sum(1).mean()
        undecided = -(F.log_softmax(net.base.head(z_p), 1) * q).sum(1).mean()
        of_rest.zero_grad()
        (ce + method.lam * undecided - method.mu * log_ratio(z_p, z)).backward()
        of_rest.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]), ce.detach()


@VARIANTS
@pytest.mark.parametrize("count", [2, 5, 8], ids=["fewer samples", "as many", "more"])
@pytest.mark.parametrize("transform", [False, True], ids=["autograd", "transform"])
def test_steps_are_those_of_separate_optimisers(method, count, transform):
    setting = adapted(method)
    task = setting.task.transformable() if transform else setting.task
    batch = task.fetch(BatchIndices(torch.arange(10, 10 + count)))
    y = start = away_from(setting.w0)
    for _ in range(3):
        y, value = method.step(task, y, batch, local(setting))
    want, ce = by_hand(method, setting, setting.w0, start, batch.x, batch.y, 0.05, 3)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(value, ce, rtol=0, atol=1e-10)


def test_the_max_step_moves_the_projector_and_the_min_step_the_rest():
    method = FedBR(pseudo=5)
    setting = adapted(method)
    task, w = setting.task, away_from(setting.w0)
    batch, p = task.fetch(BatchIndices(torch.arange(4))), task.mask("projector").bool()

    def moved(method, lr=0.05):
        new, _ = method.step(task, w, batch, local(setting, lr=lr))
        return (new - w) / lr

    both, only_ce = moved(method), moved(FedBR(pseudo=5, mu=0.0))
    assert float(both[p].norm()) > 1e-6
    assert float(only_ce[p].norm()) == 0  # without mu the projector rests
    # The max step descends on +mean r, whatever lam and mu weigh in the min step.
    torch.testing.assert_close(moved(FedBR(pseudo=5, lam=3.0, mu=7.0))[p], both[p], rtol=0, atol=1e-14)
    f, f_p, f_g = (
        task.part(at, "features", x)
        for at, x in (
            (w, batch.x),
            (w, task.inputs(setting.one_time_payload["x_p"])),
            (setting.w0, task.inputs(setting.one_time_payload["x_p"])),
        )
    )
    three = torch.cat([f_p, f_g, f[[0, 1, 2, 3, 0]]])
    _, g = task.value_and_grad(lambda at: method.ratio(task, at, three), w)
    torch.testing.assert_close(both[p], -g[p], rtol=0, atol=1e-12)
    assert float(g[~p].norm()) == 0
    # The min step sees the projector after the max step: it differs from the gradient at the old one.
    late, early = moved(method)[~p], moved(method, lr=1e-9)[~p]
    assert float((late - early).norm()) > 1e-5


@ENGINES
def test_without_weights_it_is_fedavg(engine):
    method = FedBR(lam=0.0, mu=0.0)
    setting = adapted(method)
    a, left = run_rounds(setting, method, engine, 3)
    b, right = run_rounds(setting, methods.create("fedavg"), engine, 3)
    assert torch.equal(a.w, b.w)
    assert [r.train_loss for r in left] == [r.train_loss for r in right]


@pytest.mark.parametrize("lam", [1e-13, 0.0])
def test_vanishing_weights_lead_to_fedavg(lam):
    """The long way too, but for the projector."""
    method = FedBR(lam=lam, mu=1e-13, pseudo=4)
    setting = adapted(method)
    a, b = (run_rounds(setting, m, Loop(), 2)[0].w for m in (method, methods.create("fedavg")))
    rest = ~setting.task.mask("projector").bool()
    torch.testing.assert_close(a[rest], b[rest], rtol=0, atol=1e-11)


def test_padding_changes_nothing():
    method = FedBR(pseudo=5, mixture=True)
    setting = adapted(method)
    rows = [
        BatchIndices(torch.tensor([4, 7, 9])),
        BatchIndices(torch.tensor([4, 7, 9, 0, 0]), torch.tensor([1, 1, 1, 0, 0])),
    ]
    a, b = (method.step(setting.task, setting.w0, setting.task.fetch(r), local(setting)) for r in rows)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    empty = setting.task.fetch(BatchIndices(torch.tensor([0, 0]), torch.tensor([0, 0])))
    y, value = method.step(setting.task, setting.w0, empty, local(setting))
    assert bool(y.isfinite().all())
    assert float(value) == 0


@VARIANTS
@pytest.mark.parametrize("engine", [Stacked(), Stacked(narrow=False)], ids=["narrow", "masked"])
def test_engines_agree(method, engine):
    setting = adapted(method)
    (a, left), (b, right) = (run_rounds(setting, method, e, 3) for e in (Loop(), engine))
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    assert [r.train_loss for r in left] == pytest.approx([r.train_loss for r in right], abs=1e-10)
    fedavg, _ = run_rounds(setting, methods.create("fedavg"), Loop(), 3)
    p = setting.task.mask("projector").bool()
    assert float((a.w - fedavg.w)[~p].norm()) > 1e-4
    assert float((a.w - setting.w0)[p].norm()) > 1e-5


def test_pseudo_samples_are_averages_of_one_client():
    """Clients with values of their own: an average tells whose it is."""
    labels = np.zeros(12, np.int64)
    x = np.repeat([10, 10, 10, 100, 100, 100], 2).astype(np.uint8)[:, None, None, None] * np.ones(
        (1, 2, 3, 1), np.uint8
    )
    data = Dataset.from_arrays(x, labels, x, labels, classes=2)
    world = FederatedData(
        data, Partition.from_sizes(np.arange(12), np.array([6, 0, 6])), 3, 0.1, 4, torch.device("cpu")
    )
    x_p = FedBR(pseudo=40).learn(world)["x_p"]
    assert (x_p.shape, x_p.dtype) == ((40, 1, 2, 3), torch.float32)
    assert set(x_p.unique().tolist()) == {10.0, 100.0}
    assert torch.equal(FedBR(pseudo=40).learn(world)["x_p"], x_p)
    assert not torch.equal(FedBR(pseudo=40).learn(replace(world, seed=4))["x_p"], x_p)


def test_one_sample_an_average_is_a_sample_and_layout_follows_the_network():
    rng = np.random.default_rng(0)
    x, labels = rng.integers(256, size=(9, 4, 5, 3)).astype(np.uint8), np.zeros(9, np.int64)
    world = FederatedData(
        Dataset.from_arrays(x, labels, x, labels, classes=2),
        *(Partition.from_sizes(np.arange(9), np.array([4, 5])), 0, 0.1, 4, torch.device("cpu")),
    )
    samples = {s.tobytes() for s in x.transpose(0, 3, 1, 2).astype(np.float32)}
    x_p = FedBR(pseudo=6, averaged=1).learn(world)["x_p"]
    assert x_p.shape == (6, 3, 4, 5)
    assert all(s.numpy().tobytes() in samples for s in x_p)
    rows = x.reshape(9, -1).astype(np.float32)
    flat = replace(world, data=Dataset.from_arrays(rows, labels, rows, labels, classes=2))
    x_p = FedBR(pseudo=6, averaged=3).learn(flat)["x_p"]
    assert (x_p.shape, x_p.dtype) == ((6, 60), torch.float32)


def test_what_is_handed_out_and_disclosed():
    method, world = FedBR(pseudo=7, averaged=4), world_of(small_setting())
    learned = method.learn(world)
    furnished = method.extend_data(world, learned)
    assert torch.equal(furnished.one_time_payload["x_p"], learned["x_p"])
    assert furnished.disclosed == {"averages": 7, "samples_per_average": 4}
    assert furnished.up_once == 7 * 36 / 8
    assert (world.one_time_payload, world.disclosed) == ({}, {})
    assert furnished.data is world.data


def test_networks_without_the_parts_are_refused():
    with pytest.raises(BadInputError) as error:
        FedBR().adapt(nn.Linear(4, 2))
    assert str(error.value) == (
        "FedBR needs features, but this model defines none: give it a features() method or choose another method"
    )


@pytest.mark.parametrize(
    "hyper", [{"lam": -1.0}, {"mu": -0.1}, {"t1": 0.0}, {"t2": 0.0}, {"pseudo": 0}, {"averaged": 0}]
)
def test_domains(hyper):
    with pytest.raises(BadInputError, match=f"fedbr: {next(iter(hyper))} = "):
        FedBR(**hyper)
