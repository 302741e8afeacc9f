"""The private step: what one client can change, the noise, and what is left when there is none."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort
from feddpc.privacy import ClippedSum, Mechanism
from feddpc.privacy.mechanism import check
from support import VARIANTS

#: Every form of the two methods that privacy is for.
PRIVATE = {k: m for k, m in VARIANTS.items() if m.name in ("fedavg", "feddpc") and k != "feddpc exclude"}
FORMS = pytest.mark.parametrize("method", PRIVATE.values(), ids=PRIVATE)
D = 12


def mechanism(**values):
    return Mechanism(**{"clip": 1.0, "noise": 0.0, "delta": 1e-5, "cohort": 4, "population": 20, **values})


def cohort(m, round=3):
    return Cohort(
        round=round,
        clients=torch.arange(m),
        population=20,
        weights=torch.full((m,), 1 / max(m, 1), dtype=torch.float64),
        steps=torch.arange(1, m + 1, dtype=torch.float64),
        client_lr=0.05,
        server_lr=0.2,
    )


def some(m, seed=0, size=1.0, dtype=torch.float64):
    """A model, the server's memory, and what ``m`` clients send, in the form of the method."""
    rng = torch.Generator().manual_seed(seed)
    draw = [torch.randn(D, generator=rng, dtype=torch.float64) for _ in range(2 + m)]
    return draw[0].to(dtype), draw[1].to(dtype), torch.stack(draw[2:]).to(dtype) * size if m else None


def sent(method, g, u_md, steps):
    """What clients with updates ``u_md`` send."""
    if getattr(method, "form", "") != "client":
        return {"delta": u_md}
    group = dataclasses.replace(cohort(len(u_md), 3), steps=steps)
    rows, notes = dataclasses.replace(method, form="matrix").transform({"delta": g}, {"delta": u_md}, group)
    return {
        "delta": torch.stack(list(rows["delta"])),
        "guarded": torch.zeros(len(u_md), dtype=u_md.dtype) + notes["guarded"] / len(u_md),
    }


def private_step(method, how, m, u_md, w, g, round=3):
    group = cohort(m, round)
    up = sent(method, g, u_md, group.steps) if m else {}
    return how.step(method, w, {"delta": g} if method.name == "feddpc" else {}, up, group)


def displacement(step, how):
    """By how much the sum of the cohort's vectors is seen to move, from the model's own step."""
    rate = float(step.rate)
    return step.update * rate / (0.2 / 0.05) * how.cohort


vectors = st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=6)


@settings(deadline=None)
@given(rows=vectors, other=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), clip=st.floats(1e-3, 1e3))
def test_one_client_moves_the_sum_by_the_clip_at_most(rows, other, clip):
    def total(rows):
        found = ClippedSum(clip, torch.zeros(3))
        for row in rows:
            found.add(torch.tensor(row, dtype=torch.float64))
        return found.value

    whole, bound = total(rows), clip * (1 + 1e-9)
    assert (whole - total(rows[1:])).norm() <= bound  # left out
    assert (whole - total([*rows, other])).norm() <= bound  # come in
    assert (whole - total([other, *rows[1:]])).norm() <= 2 * bound  # changed


def test_short_vectors_are_added_as_they_are_and_long_ones_keep_their_direction():
    total = ClippedSum(2.0, torch.zeros(2))
    total.add(torch.tensor([0.3, -0.4]))
    assert (total.value.float() == torch.tensor([0.3, -0.4])).all()
    total.add(torch.tensor([30.0, 40.0]))
    torch.testing.assert_close(total.value, torch.tensor([1.5, 1.2], dtype=torch.float64), rtol=0, atol=1e-7)
    assert total.cut == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_vector_without_a_length_counts_as_zero(bad):
    total = ClippedSum(1.0, torch.zeros(2))
    total.add(torch.tensor([bad, 1.0], dtype=torch.float64))
    assert (total.value == 0).all()
    assert total.cut == 1


@FORMS
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_one_client_moves_the_step_by_the_clip_at_most(method, size):
    """The whole rule, without noise: transform, clip, sum, fixed divisor, what the method makes of the mean."""
    how = mechanism()
    for seed in range(5):
        w, g, u_md = some(4, seed, size)
        whole = displacement(private_step(method, how, 4, u_md, w, g), how)
        less = displacement(private_step(method, how, 3, u_md[:3], w, g), how)
        assert (whole - less).norm() <= 1 + 1e-9
        assert whole.norm() <= 4 + 1e-9
        if size == 1e3 and method.name == "fedavg":
            assert (whole - less).norm() == pytest.approx(1.0)  # the bound is sharp


@FORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_noise_and_with_room_it_is_the_plain_step(method, dtype):
    """An identity: no clip binds, as many clients as expected came, no noise."""
    w, g, u_md = some(4, dtype=dtype)
    server = {"delta": g} if method.name == "feddpc" else {}
    group = cohort(4)
    up = sent(method, g, u_md, group.steps)
    plain = method.aggregate(w, server, up, group)
    private = mechanism(clip=1e9).step(method, w, server, up, group)
    tight = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(private.update * private.rate, plain.update * plain.rate, **tight)
    for key, value in plain.server.items():
        torch.testing.assert_close(private.server[key], value, **tight)
        assert private.server[key].dtype == dtype
    for key, value in plain.notes.items():
        assert float(private.notes[key]) == pytest.approx(float(value), rel=1e-6)
    assert private.notes["clipped"] == 0


@FORMS
def test_the_divisor_is_the_expected_cohort_whoever_came(method):
    w, g, u_md = some(2)
    before = getattr(method, "momentum", 0.0) * g  # of the last step, which is not divided
    steps = [private_step(method, mechanism(cohort=c, clip=0.1), 2, u_md, w, g).update - before for c in (2, 10)]
    torch.testing.assert_close(steps[0], 5 * steps[1])


@FORMS
def test_the_step_stays_orthogonal_to_the_last_one_noise_included(method):
    w, g, u_md = some(4)
    step = private_step(method, mechanism(noise=3.0), 4, u_md, w, g)
    if method.name == "feddpc" and method.projection and method.guard != "keep":
        fresh = step.update - method.momentum * g
        assert abs(torch.dot(fresh, g)) < 1e-12 * step.update.norm() * g.norm()
    if method.name == "feddpc":
        assert torch.equal(step.server["delta"], step.update)  # the memory is the noisy update, nothing cleaner


def test_noise_has_the_stated_deviation_in_every_round_and_with_nobody_there():
    how, d = mechanism(noise=1.5, clip=0.2, cohort=5), 200_000
    w, fedavg = torch.zeros(d, dtype=torch.float64), methods.create("fedavg")
    noises = [displacement(how.step(fedavg, w, {}, {}, cohort(0, t)), how) for t in (1, 2)]
    for noise in noises:
        x = noise / (1.5 * 0.2)
        assert abs(x.mean()) < 5 / math.sqrt(d)
        assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / d)
        assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / d)
        inside = float((x.abs() < 1).double().mean())
        assert inside == pytest.approx(math.erf(1 / math.sqrt(2)), abs=5 * math.sqrt(0.25 / d))
    assert abs(np.corrcoef(*noises)[0, 1]) < 5 / math.sqrt(d)


def test_noise_is_added_to_the_sum_and_does_not_depend_on_who_came():
    w, g, u_md = some(4)
    fedavg = methods.create("fedavg")
    quiet, loud = mechanism(), mechanism(noise=2.0)
    alone = displacement(private_step(fedavg, loud, 0, None, w, g), loud)
    added = displacement(private_step(fedavg, loud, 4, u_md, w, g), loud)
    torch.testing.assert_close(added - alone, displacement(private_step(fedavg, quiet, 4, u_md, w, g), quiet))


def test_noise_comes_from_the_seed_or_from_the_operating_system():
    w, g, u_md = some(4)
    for reproducible in (True, False):
        how = mechanism(noise=1.0, reproducible=reproducible)
        one, two = (private_step(methods.create("fedavg"), how, 4, u_md, w, g).update for _ in range(2))
        assert torch.equal(one, two) is reproducible
    group = cohort(4)
    other = dataclasses.replace(group, seed=1)
    how = mechanism(noise=1.0)
    assert not torch.equal(*(how.release(ClippedSum(1.0, w), c) for c in (group, other)))


def test_the_notes_tell_what_was_cut_and_what_was_spent():
    w, g, u_md = some(4)
    u_md[0] /= 1e3
    how = mechanism(noise=1.0)
    notes = private_step(methods.create("fedavg"), how, 4, u_md, w, g, round=7).notes
    assert notes["clipped"] == 3 / 4
    assert notes["epsilon"] == how.epsilon(7) > how.epsilon(6) > 0


@pytest.mark.parametrize("name", [n for n in methods.names() if n not in ("fedavg", "feddpc")])
def test_other_methods_are_refused(name):
    with pytest.raises(BadInputError, match=f"^{name} cannot be run with privacy: only fedavg and feddpc"):
        check(VARIANTS[name])


def test_a_method_derived_from_a_private_one_is_refused_and_so_is_a_divisor_that_tells():
    class Chatty(type(methods.create("fedavg"))):
        name = "chatty"

    with pytest.raises(BadInputError, match="chatty cannot be run with privacy"):
        check(Chatty())
    with pytest.raises(BadInputError, match="guard = 'exclude' divides by"):
        check(methods.create("feddpc", guard="exclude"))
    for method in PRIVATE.values():
        check(method)
