"""MOON: its contrast by hand, when it is FedAvg, what clients remember, which networks it takes."""

import math

import numpy as np
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
from feddpc.methods.moon import MOON, contrast
from feddpc.models import SmallCNN, seeded
from feddpc.tasks.base import BatchIndices
from support import run_rounds, small_setting

ENGINES = pytest.mark.parametrize(
    "engine", [Loop(), Stacked(), Stacked(narrow=False)], ids=["loop", "narrow", "masked"]
)
MOON_SMALL = MOON(width=7, mu=2.0)


def adapted(method=MOON_SMALL, **values):
    """The small federation, with the network that the method makes of a SmallCNN."""
    base = small_setting(**values)
    net = seeded(lambda: method.adapt(SmallCNN(3, 1, 6, width=4)), 0)
    return build(base.config, data=base.data, module=net, partition=base.partition)


def test_contrast_by_hand():
    z = torch.tensor([[3.0, 4.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    z_glob = torch.tensor([[4.0, 3.0], [0.0, 2.0], [-2.0, -2.0]], dtype=torch.float64)
    z_prev = torch.tensor([[0.0, 5.0], [7.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    cosines = [(24 / 25, 4 / 5), (0.0, 1.0), (-1.0, 1.0)]
    for tau in (0.1, 0.5, 1.0):
        want = [-math.log(math.exp(g / tau) / (math.exp(g / tau) + math.exp(p / tau))) for g, p in cosines]
        torch.testing.assert_close(contrast(z, z_glob, z_prev, tau).tolist(), want, rtol=0, atol=1e-12)


def test_contrast_with_one_model_is_log_two_and_pulls_nowhere():
    z, other = torch.randn(2, 5, 7, dtype=torch.float64)
    z.requires_grad_(True)
    values = contrast(z, other, other, 0.5)
    torch.testing.assert_close(values, torch.full_like(values, math.log(2)), rtol=0, atol=1e-15)
    values.sum().backward()
    assert float(z.grad.abs().max()) == 0


def test_extreme_cosines_stay_finite():
    """exp(cos / tau) would overflow in float32."""
    z = torch.tensor([[1.0, 0.0]])
    assert float(contrast(z, -z, z, 1e-3)) == pytest.approx(2000)
    assert float(contrast(z, z, -z, 1e-3)) == 0


@ENGINES
def test_without_weight_it_is_fedavg(engine):
    method = MOON(width=7, mu=0.0)
    setting = adapted(method)
    a, left = run_rounds(setting, method, engine, 4)
    b, right = run_rounds(setting, methods.create("fedavg"), engine, 4)
    assert torch.equal(a.w, b.w)
    assert [r.train_loss for r in left] == [r.train_loss for r in right]


@ENGINES
def test_a_first_participation_is_fedavg(engine):
    """In round 1, and in any round whose clients all come for the first time; afterwards it differs."""
    setting = adapted(cohort=8)
    a, b = (run_rounds(setting, m, engine, 1) for m in (MOON_SMALL, methods.create("fedavg")))
    torch.testing.assert_close(a[0].w, b[0].w, rtol=0, atol=1e-12)
    assert a[1][0].train_loss == pytest.approx(b[1][0].train_loss + 2 * math.log(2), abs=1e-12)
    again, other = (run_rounds(setting, m, engine, 2)[0].w for m in (MOON_SMALL, methods.create("fedavg")))
    assert float((again - other).norm()) > 1e-4


@ENGINES
def test_a_first_participation_in_a_later_round_is_fedavg(engine):
    """What it is compared with is the global model of that round, not the initial one."""
    setting = adapted()
    later = run_rounds(setting, methods.create("fedavg"), engine, 2)[0].w
    plan = setting.planner.plan(3, np.array([1, 4, 6]))
    fresh = {k: torch.stack([v] * 3) for k, v in MOON_SMALL.init_client(setting.w0).items()}
    a, b = (
        engine.train(m, setting.task, later, {}, own, plan, 0.05)
        for m, own in ((MOON_SMALL, fresh), (methods.create("fedavg"), {}))
    )
    torch.testing.assert_close(a.uploads["delta"], b.uploads["delta"], rtol=0, atol=1e-12)
    torch.testing.assert_close(a.memory["prev"], later - a.uploads["delta"], rtol=0, atol=1e-12)
    assert a.memory["seen"].tolist() == [1, 1, 1]
    used = engine.train(
        MOON_SMALL, setting.task, later, {}, {**fresh, "seen": torch.ones_like(fresh["seen"])}, plan, 0.05
    )
    assert float((used.uploads["delta"] - b.uploads["delta"]).norm()) > 1e-4


def test_the_objective_is_that_of_separate_networks():
    """Three networks, each with its own weights, as the authors train them."""
    setting = adapted()
    task = setting.task
    generator = torch.Generator().manual_seed(1)
    y, prev = (setting.w0 + 0.1 * torch.randn(task.d, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = task.fetch(BatchIndices(torch.tensor([1, 5, 20, 33, 7])))
    nets = []
    for w in (y, setting.w0, prev):
        net = MOON_SMALL.adapt(SmallCNN(3, 1, 6, width=4)).double()
        net.load_state_dict(setting.task.flat.state_dict(w))
        nets.append(net)
    local, server, old = nets
    z, logits = local.projections_and_logits(batch.x)
    cosine = nn.CosineSimilarity(dim=-1)
    pairs = torch.stack([cosine(z, server.project(batch.x).detach()), cosine(z, old.project(batch.x).detach())], 1)
    loss = F.cross_entropy(logits, batch.y) + 2.0 * F.cross_entropy(pairs / 0.5, torch.zeros(5, dtype=torch.int64))
    loss.backward()
    want = torch.cat([p.grad.reshape(-1) for p in local.parameters()])
    ctx = ClientContext(setting.w0, {}, {"prev": prev, "seen": torch.ones(())}, 0.05, torch.tensor(1.0))
    value, g = task.value_and_grad(lambda at: MOON_SMALL.objective(task, at, batch, ctx), y)
    torch.testing.assert_close(value, loss.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(g, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", [Stacked(), Stacked(narrow=False)], ids=["narrow", "masked"])
def test_engines_agree(engine):
    setting = adapted()
    (a, left), (b, right) = (run_rounds(setting, MOON_SMALL, e, 4) for e in (Loop(), engine))
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    assert [r.train_loss for r in left] == pytest.approx([r.train_loss for r in right], abs=1e-10)
    (ids, table), (others, other) = a.clients.export(), b.clients.export()
    assert ids.tolist() == others.tolist()
    for key, value in table.items():
        torch.testing.assert_close(other[key], value, rtol=0, atol=1e-10)
    fedavg, _ = run_rounds(setting, methods.create("fedavg"), Loop(), 4)
    assert float((a.w - fedavg.w).norm()) > 1e-4


class NoHead(nn.Module):
    def features(self, x):
        return x.flatten(1)


class OddHead(NoHead):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            nn.Linear(4, 2),
            "MOON needs features, but this model defines none: give it a features() method or choose another method",
        ),
        (
            NoHead(),
            "MOON needs head, but this model defines none: give it a head, an nn.Linear, or choose another method",
        ),
        (
            OddHead(),
            "MOON needs a linear head, but this model's is a Sequential: make it an nn.Linear on top of features(), "
            "or choose another method",
        ),
    ],
)
def test_networks_without_the_parts_are_refused(net, message):
    with pytest.raises(BadInputError) as error:
        MOON().adapt(net)
    assert str(error.value) == message


@pytest.mark.parametrize("hyper", [{"mu": -0.1}, {"tau": 0.0}, {"width": 0}])
def test_domains(hyper):
    with pytest.raises(BadInputError, match=f"moon: {next(iter(hyper))} = "):
        MOON(**hyper)
