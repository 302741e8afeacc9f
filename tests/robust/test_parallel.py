"""What a client that knows the last global update can do to FedDPC, and what is left of it with a largest factor."""

import math

import pytest
import torch

from feddpc import methods
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort
from feddpc.methods.feddpc import FedDPC
from feddpc.quadratic import trajectory
from feddpc.robust import attacks

F64 = torch.float64
ONE = torch.ones(1, dtype=F64)


def setting(d=1000, m=10):
    gen = torch.Generator().manual_seed(0)
    return torch.randn(m, d, generator=gen, dtype=F64), torch.randn(d, generator=gen, dtype=F64)


#: The bound that docs/attacks.md recommends for federations with clients that are not trusted.
BOUNDED = FedDPC(max_scale=10.0)


def contribution(rule, D, g):
    """v of one update, and the notes."""
    return rule.direction(D[None], g, ONE)


@pytest.mark.parametrize("tilt", [1e-1, 1e-3, 1e-5])
def test_without_a_largest_factor_a_hidden_part_becomes_a_full_step(tilt):
    """The update looks like the last one to 1 - tilt^2 / 2, and moves the model by its full length elsewhere."""
    x, g = setting()
    D = attacks.parallel(g, tilt)(x)[0]
    v, notes = contribution(FedDPC(), D, g)
    assert float(notes["mean_scale"]) == pytest.approx(1 + 1 / tilt, rel=1e-6)
    assert float(v.norm()) == pytest.approx(float(D.norm()) * (1 + tilt), rel=1e-6)
    wanted = -x.mean(0)
    wanted = wanted - (wanted @ g) / (g @ g) * g
    assert float(v @ wanted / (v.norm() * wanted.norm())) > 1 - 1e-9
    assert 1 - float(D @ g / (D.norm() * g.norm())) < 0.6 * tilt**2


@pytest.mark.parametrize("tilt", [1e-2, 1e-3, 1e-5])
def test_with_it_the_hidden_part_counts_for_at_most_ten_times_what_it_is(tilt):
    x, g = setting()
    D = attacks.parallel(g, tilt)(x)[0]
    v, notes = contribution(BOUNDED, D, g)
    assert float(v.norm()) == pytest.approx(10 * tilt * float(D.norm()), rel=1e-6)
    assert float(notes["capped"]) == 1


def test_the_length_was_never_unbounded():
    """2(f) 3: however it is sent, nobody contributes more than (1 + lambda) times the length of what it sent."""
    x, g = setting()
    for tilt in (1.0, 0.5, 1 / 9, 1e-2, 2e-6, 1e-7):
        D = attacks.parallel(g, tilt)(x)[0]
        for rule in (FedDPC(), BOUNDED):
            assert float(contribution(rule, D, g)[0].norm()) <= 2 * float(D.norm()) * (1 + 1e-9)


def test_who_tilts_enough_to_stay_below_the_largest_factor_is_plain_to_see():
    """At 1/9 an attacker has its full length back, but then a ninth of its update is not along g: 6.4 degrees."""
    x, g = setting()
    D = attacks.parallel(g, 1 / 9)(x)[0]
    v, _ = contribution(BOUNDED, D, g)
    assert float(v.norm()) == pytest.approx(float(D.norm()) * (1 + 1 / 9), rel=1e-6)
    assert math.degrees(math.acos(float(D @ g / (D.norm() * g.norm())))) == pytest.approx(6.38, abs=0.01)


@pytest.mark.parametrize("form", ["matrix", "streaming"])
@pytest.mark.parametrize("guard", ["zero", "exclude", "soft", "keep"])
def test_all_forms_and_guards_have_the_largest_factor(form, guard):
    x, g = setting(m=3)
    x[0] = attacks.parallel(g, 1e-3)(x)[0]
    rule = FedDPC(form=form, guard=guard, max_scale=10.0)
    cohort = Cohort(2, torch.arange(3), 3, torch.full((3,), 1 / 3), torch.ones(3), 1.0, 1.0)
    rows = list(rule.transform({"delta": g}, {"delta": x}, cohort)[0]["delta"])
    assert float(rows[0].norm()) == pytest.approx(1e-2 * float(x[0].norm()), rel=1e-3)


def test_angles_beyond_the_bound_are_untouched():
    """Beyond 6.4 degrees from g the numbers are those of Algorithm 1, bit for bit."""
    x, g = setting()
    one, other = (FedDPC(max_scale=cap).direction(x, g, torch.full((10,), 0.1, dtype=F64))[0] for cap in (10.0, 0.0))
    assert torch.equal(one, other)


@pytest.mark.parametrize("value", [2.0, -1.0, 1.0])
def test_a_largest_factor_below_that_of_an_orthogonal_update_is_refused(value):
    with pytest.raises(BadInputError, match="above lam"):
        methods.create("feddpc", max_scale=value)


def test_the_default_is_algorithm_1_at_every_angle():
    """Honest clients can be close to g: two of them, full batches of one distribution, small steps."""
    path = trajectory(
        "feddpc", curvature=[[1, 2], [1.02, 2]], centre=[[0, 0], [0, 0.01]], w0=[3.0, 1.0],
        schedule=[[0, 1]] * 30, client_lr=0.001, server_lr=0.001, steps=2,
    )  # fmt: skip
    w, g, largest = torch.tensor([3.0, 1.0], dtype=F64), torch.zeros(2, dtype=F64), 0.0
    a, c = (torch.tensor(x, dtype=F64) for x in ([[1, 2], [1.02, 2]], [[0, 0], [0, 0.01]]))
    for reached in path[1:]:
        D = (1 - (1 - 0.001 * a) ** 2) / 0.001 * (w - c)
        v = []
        for D_j in D:
            r = D_j - (D_j @ g) / (g @ g) * g if bool(g.any()) else D_j
            largest = max(largest, float(1 + D_j.norm() / r.norm()))
            v.append((1 + D_j.norm() / r.norm()) * r)
        g = torch.stack(v).mean(0)
        w = w - 0.001 * g
        assert torch.allclose(torch.from_numpy(reached), w, rtol=0, atol=1e-9)
    assert largest > 10


def test_a_large_lambda_needs_no_bound():
    assert methods.create("feddpc", lam=50).max_scale == 0
