"""FedDPC's exact properties, methods.md 2(f), its guard, and the equality of its three forms."""

import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.methods._algebra import project_out_, residuals
from feddpc.methods._feddpc_stream import Stream
from feddpc.methods.base import ClientContext, Cohort
from feddpc.methods.feddpc import FedDPC
from feddpc.quadratic import trajectory
from feddpc.round.server_step import StepOutcome, apply_step_
from support import Q4, run_rounds, setting_for

F64 = torch.float64


def uniform(m):
    return torch.full((m,), 1 / max(m, 1), dtype=F64)


def cohort(m, **more):
    values = {
        "round": 2,
        "clients": torch.arange(m),
        "population": max(m, 1),
        "weights": uniform(m),
        "steps": torch.ones(m, dtype=F64),
        "client_lr": 1.0,
        "server_lr": 1.0,
    }
    return Cohort(**(values | more))


@st.composite
def problems(draw):
    """A stack of updates and a previous update, with zero, parallel, anti-parallel, tiny and huge ones among them."""
    d, m = draw(st.integers(1, 20)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    g = rng.standard_normal(d) * draw(st.sampled_from([0.0, 1.0, 1.0, 1e-20, 1e20]))
    rows = []
    for _ in range(m):
        kind = draw(st.sampled_from(["free", "free", "free", "zero", "parallel", "near"]))
        row = rng.standard_normal(d)
        if kind == "zero":
            row = np.zeros(d)
        elif kind == "parallel":
            row = g * rng.choice([-3.0, 0.5])
        elif kind == "near":
            row = g / (np.linalg.norm(g) or 1.0) + rng.standard_normal(d) * 10.0 ** -rng.integers(1, 5)
        rows.append(row * draw(st.sampled_from([1.0, 1.0, 1e-20, 1e20])))
    return torch.tensor(np.array(rows), dtype=F64), torch.tensor(g, dtype=F64)


def exact_direction(D, g, lam, tau=1e-6):
    """The rule in 60-digit arithmetic, straight from Algorithm 1."""
    with mpmath.workdps(60):
        G = mpmath.fsum(mpmath.mpf(float(x)) ** 2 for x in g)
        total = [mpmath.mpf(0)] * len(g)
        for row in D:
            row = [mpmath.mpf(float(x)) for x in row]
            gg = [mpmath.mpf(float(x)) for x in g]
            p = mpmath.fsum(x * y for x, y in zip(row, gg, strict=True)) / G if G else mpmath.mpf(0)
            r = [x - p * y for x, y in zip(row, gg, strict=True)]
            norm_d, norm_r = (mpmath.sqrt(mpmath.fsum(x * x for x in v)) for v in (row, r))
            if norm_d and norm_r > tau * norm_d:
                s = lam + norm_d / norm_r
                total = [t + s * x for t, x in zip(total, r, strict=True)]
        return np.array([float(t / len(D)) for t in total])


@given(problems(), st.sampled_from([-0.5, 0.0, 1.0, 3.0]))
@settings(max_examples=200, deadline=None)
def test_agrees_with_sixty_digits(problem, lam):
    D, g = problem
    got = FedDPC(lam=lam, max_scale=0.0).direction(D, g, uniform(len(D)))[0].numpy()
    want = exact_direction(D, g, lam)
    size = float((1 + abs(lam)) * D.norm(dim=1).mean()) or 1.0
    np.testing.assert_allclose(got, want, atol=1e-10 * size, rtol=0)


@given(problems(), st.sampled_from([-1.0, -0.5, 0.0, 1.0, 3.0]))
@settings(max_examples=100, deadline=None)
def test_orthogonal_bounded_and_finite(problem, lam):
    """Properties 2 and 3: orthogonal to g, and every |v_j| = |D_j| + lambda |r_j| unless guarded."""
    D, g = problem
    rule = FedDPC(lam=lam, max_scale=0.0)
    delta = rule.direction(D, g, uniform(len(D)))[0]
    assert bool(delta.isfinite().all())
    assert abs(float(delta @ (g / (g.norm() or 1.0)))) <= 1e-12 * float(D.norm(dim=1).sum() or 1.0) * (2 + abs(lam))
    look = residuals(D, g)
    for row, r2, x2 in zip(D, look.r2_m, look.x2_m, strict=True):
        v = rule.direction(row[None], g, uniform(1))[0]
        guarded = float(r2.sqrt()) <= 1e-6 * float(x2.sqrt())
        expected = 0.0 if guarded else float(x2.sqrt() + lam * r2.sqrt())
        assert float(v.norm()) == pytest.approx(expected, rel=1e-9, abs=1e-12 * float(x2.sqrt()))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_descent(problem):
    """Property 4: <D_j, v_j> = |D_j| |r_j| + lambda |r_j|^2 >= 0."""
    D, g = problem
    look = residuals(D, g)
    for lam in (-1.0, 0.0, 2.0):
        for row, x2, r2 in zip(D, look.x2_m, look.r2_m, strict=True):
            if r2 <= 1e-8 * x2:
                continue
            v = FedDPC(lam=lam, max_scale=0.0).direction(row[None], g, uniform(1))[0]
            want = float((x2 * r2).sqrt() + lam * r2)
            assert float(row @ v) == pytest.approx(want, rel=1e-6, abs=1e-9 * float(x2))


def stack(m=5, d=7, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(m, d, generator=gen, dtype=F64), torch.randn(d, generator=gen, dtype=F64)


def direction(lam, D, g, **hyper):
    return FedDPC(lam=lam, **hyper).direction(D, g, uniform(len(D)))[0]


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_round_one_is_a_longer_average():
    """Property 1."""
    D, _ = stack()
    close(direction(2.0, D, torch.zeros(7, dtype=F64)), 3.0 * D.mean(0))


def test_affine_in_lambda_and_the_ablation_is_the_slope():
    """Properties 5 and 6."""
    D, g = stack()
    no_scaling = direction(1.0, D, g, scaling=False)
    close(direction(2.0, D, g) - direction(1.0, D, g), no_scaling)
    close(direction(-0.7, D, g), direction(0.0, D, g) - 0.7 * no_scaling)
    close(no_scaling, project_out_(D.mean(0), g))


@pytest.mark.parametrize("factor", [3.0, -2.0, 1e-9, -1e12])
def test_only_the_line_of_g_matters(factor):
    """Property 7, scale and sign of g."""
    D, g = stack()
    close(direction(1.0, D, factor * g), direction(1.0, D, g))


@pytest.mark.parametrize("factor", [0.0, 3.0, -2.0])
def test_homogeneous(factor):
    """Property 7, Delta(cD) = c Delta(D) for every real c."""
    D, g = stack()
    close(direction(1.0, factor * D, g), factor * direction(1.0, D, g))


def test_equivariant_under_rotation_and_permutation():
    """Property 7."""
    D, g = stack()
    Q = torch.linalg.qr(torch.randn(7, 7, dtype=F64, generator=torch.Generator().manual_seed(5)))[0]
    close(direction(1.0, D @ Q.T, Q @ g), Q @ direction(1.0, D, g))
    close(direction(1.0, D[[3, 1, 4, 0, 2]], g), direction(1.0, D, g))


def test_a_multiple_of_g_changes_the_scale_only():
    """Property 7: r_j stays, s_j changes."""
    D, g = stack(m=1)
    before, after = residuals(D, g), residuals(D + 5 * g, g)
    close(before.r2_m, after.r2_m, 1e-9)
    assert not torch.allclose(before.x2_m, after.x2_m)


def test_updates_orthogonal_to_g():
    """Property 8."""
    D, g = stack()
    D = torch.stack([project_out_(row.clone(), g) for row in D])
    close(direction(1.5, D, g), 2.5 * D.mean(0))


def test_only_the_ratio_of_rates_matters():
    """Property 9, through the whole rule: D scales with 1 / eta_l, the step with eta_g."""
    D, g = stack()
    w, rule = torch.zeros(7, dtype=F64), FedDPC()
    steps = [
        apply_step_(w.clone(), rule.aggregate(w, {"delta": g}, {"delta": D}, cohort(5, client_lr=lr, server_lr=2 * lr)))
        for lr in (0.1, 0.7)
    ]
    close(steps[0], steps[1])


def test_two_dimensions_have_two_fixed_axes():
    """Property 10."""
    path = trajectory(
        "feddpc",
        curvature=[[1.0, 4.0], [2.0, 0.5]],
        centre=[[1.0, -1.0], [0.0, 3.0]],
        w0=[4.0, 1.0],
        schedule=[[0], [1], [0, 1], [1], [0], [0, 1]],
        client_lr=0.1,
        server_lr=0.1,
        steps=2,
    )
    moves = np.diff(path, axis=0)
    axis = moves[0] / np.linalg.norm(moves[0])
    normal = np.array([-axis[1], axis[0]])
    assert abs(moves[2::2] @ normal).max() < 1e-12
    assert abs(moves[1::2] @ axis).max() < 1e-12
    assert np.linalg.norm(moves, axis=1).min() > 1e-6


def test_one_dimension_moves_every_other_round():
    """Property 11: e_t = rho^ceil(t/2) e_0."""
    path = trajectory(
        "feddpc", curvature=[[2.0]], centre=[[0.0]], w0=[1.0], schedule=[[0]] * 6, client_lr=0.1, server_lr=0.1, steps=1
    )
    np.testing.assert_allclose(path[:, 0], [0.6 ** math.ceil(t / 2) for t in range(7)], atol=1e-15)


HAND = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-3.0, -4.0], [5.0, 0.0]], dtype=F64)
AXIS = torch.tensor([1.0, 0.0], dtype=F64)


def test_hand_example():
    close(direction(1.0, HAND[:2], AXIS), torch.tensor([0.0, 6.5], dtype=F64))
    delta, notes = FedDPC().direction(HAND, AXIS, uniform(4))
    close(delta, torch.tensor([0.0, 1.0], dtype=F64))
    assert float(notes["guarded"]) == 1
    assert float(notes["mean_scale"]) == pytest.approx((2.25 + 2 + 2.25) / 3)
    assert float(notes["mean_cosine"]) == pytest.approx((0.6 + 0 - 0.6 + 1) / 4)


@pytest.mark.parametrize(
    ("lam", "path"),
    [
        (
            0.0,
            [
                (3.6, 0.6),
                (3.29405882918443, 0.905941170815567),
                (2.94777502903067, 0.5596573706618),
                (2.68604196288928, 0.821390436803184),
                (2.3859608286843, 0.521309302598202),
            ],
        ),
        (
            1.0,
            [
                (3.2, 0.2),
                (2.84676192420619, 0.553238075793812),
                (2.33881335917762, 0.0452895107652438),
                (2.06505615040915, 0.319046719533719),
                (1.72633867788373, -0.0196707529916977),
            ],
        ),
    ],
)
def test_hand_trajectory(lam, path):
    got = trajectory(
        FedDPC(lam=lam),
        curvature=[[1.0, 4.0]],
        centre=[[0.0, 0.0]],
        w0=[4.0, 1.0],
        schedule=[[0]] * 5,
        client_lr=0.1,
        server_lr=0.1,
        steps=1,
    )
    np.testing.assert_allclose(got[1:], path, atol=1e-13)


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("zero", (0.0, 6.5 * 2 / 3)),
        ("exclude", (0.0, 6.5)),
        ("soft", (0.0, 6.5 * 2 / 3)),
        ("keep", (10.0 / 3, 6.5 * 2 / 3)),
    ],
)
def test_guards(guard, expected):
    """A parallel update counts as nothing, is left out, is bounded, or is used as it is: (lambda + 1) D."""
    D = HAND[[0, 1, 3]]
    got, notes = FedDPC(guard=guard).direction(D, AXIS, uniform(3))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=F64), atol=1e-5, rtol=0)
    assert float(notes["guarded"]) == 1


def test_soft_guard_bounds_a_nearly_parallel_update():
    D = torch.tensor([[1.0, 1e-9]], dtype=F64)
    soft = FedDPC(guard="soft", lam=0.0).direction(D, AXIS, uniform(1))[0]
    assert 0 < float(soft.norm()) < 2e-3  # |r| / (|r| + tau |D|) of the full length


def test_without_the_guard_rounding_noise_would_become_a_full_step():
    g = torch.randn(1000, dtype=F64, generator=torch.Generator().manual_seed(1))
    D = (g / 3)[None]
    assert float(direction(1.0, D, g).norm()) == 0
    look = residuals(D, g)
    p, s, guarded = FedDPC(tau=1e-300, max_scale=0.0).scales(look)
    assert not guarded
    assert float((s[0] * (D[0] - p[0] * g)).norm()) > 0.5 * float(D.norm())


@given(problems(), st.sampled_from(["zero", "exclude", "soft", "keep"]), st.booleans(), st.sampled_from([0.0, 0.7]))
@settings(max_examples=80, deadline=None)
def test_the_three_forms_agree(problem, guard, by_steps, momentum):
    D, g = problem
    m = len(D)
    steps = torch.arange(1, m + 1, dtype=F64)
    w, server = torch.zeros_like(g), {"delta": g}
    made = {}
    for form in ("matrix", "streaming", "client"):
        rule = FedDPC(form=form, guard=guard, normalize_by_steps=by_steps, momentum=momentum)
        up = {"delta": D}
        if form == "client":
            here = [ClientContext(w, {"g": g}, {}, 1.0, k) for k in steps]
            sent = [rule.finish(w - row, local)[0] for row, local in zip(D, here, strict=True)]
            up = {k: torch.stack([s[k] for s in sent]) for k in sent[0]}
        made[form] = rule.aggregate(w, server, up, cohort(m, steps=steps))
    size = float(D.norm(dim=1).sum()) or 1.0
    for form in ("streaming", "client"):
        torch.testing.assert_close(made[form].update, made["matrix"].update, rtol=0, atol=1e-9 * size)
        assert float(made[form].notes["guarded"]) == float(made["matrix"].notes["guarded"])


def test_stream_of_nothing_is_zero():
    assert float(Stream(FedDPC(), AXIS).result()[0].norm()) == 0


def test_streaming_needs_at_most_four_vectors():
    """Peak memory of a process that sees ten updates one by one, in multiples of d (read from Linux's counters)."""
    code = """
import sys
from pathlib import Path
import torch
from feddpc.methods._feddpc_stream import Stream
from feddpc.methods.feddpc import FedDPC
d = 8_000_000
g = torch.ones(d)
Stream(FedDPC(), g[:600_000]).add(torch.randn(600_000))  # warm up
status = lambda field: 1024 * int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
stream = Stream(FedDPC(), g)
for _ in range(10):
    stream.add(torch.randn(d))
stream.result()
print((status("VmHWM") - before) / (4 * d))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1.5 < float(done.stdout) < 4


def test_after_a_round_without_answers_there_is_no_projection():
    server = FedDPC().on_empty_round({"delta": AXIS})
    step = FedDPC().aggregate(torch.zeros(2, dtype=F64), server, {"delta": HAND}, cohort(4))
    close(step.update, 2 * HAND.mean(0))


FORMS = pytest.mark.parametrize("form", ["matrix", "streaming", "client"])


def one_step(rule, D, g, **more):
    """The server's step of any form, on the uploads that its clients send."""
    w, up = torch.zeros_like(g), {"delta": D}
    if rule.form == "client":
        sent = [rule.finish(w - row, ClientContext(w, {"g": g}, {}, 1.0, torch.tensor(1.0)))[0] for row in D]
        up = {k: torch.stack([s[k] for s in sent]) for k in sent[0]}
    return rule.aggregate(w, {"delta": g}, up, cohort(len(D), **more))


@FORMS
@pytest.mark.parametrize("guard", ["zero", "exclude", "soft", "keep"])
def test_without_momentum_it_is_the_paper_to_the_bit(form, guard):
    """The momentum of 0 adds nothing, not even a rounding; what is remembered is the step."""
    D, g = stack()
    step = one_step(FedDPC(form=form, guard=guard), D, g)
    same = one_step(FedDPC(form=form, guard=guard, momentum=0.0), D, g)
    assert torch.equal(step.update, same.update)
    assert torch.equal(step.server["delta"], step.update)
    paper = FedDPC(guard=guard).direction(D, g, uniform(len(D)))[0]
    if form == "matrix":
        assert torch.equal(step.update, paper)
    close(step.update, paper)


@FORMS
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_momentum_adds_a_multiple_of_the_last_step(form, lam):
    """Delta_t = momentum g + mean v_j, the mean being orthogonal to g: <Delta_t, g> = momentum |g|^2."""
    D, g = stack()
    plain, beta = one_step(FedDPC(form=form, lam=lam), D, g), 0.8
    step = one_step(FedDPC(form=form, lam=lam, momentum=beta), D, g)
    close(step.update, plain.update + beta * g)
    close(step.server["delta"], step.update)
    assert float(step.update @ g) == pytest.approx(beta * float(g @ g), rel=1e-12)


@FORMS
def test_momentum_without_projection_and_scaling_is_fedavgm(form):
    rule = FedDPC(projection=False, scaling=False, momentum=0.6, form=form)
    path = trajectory(methods.create("fedavgm", momentum=0.6), **Q4)
    np.testing.assert_allclose(trajectory(rule, **Q4), path, atol=1e-13)


@FORMS
def test_parallel_updates_leave_only_the_momentum(form):
    """Clients that repeat the last step are guarded: what is left decays by the momentum."""
    _, g = stack()
    step = one_step(FedDPC(form=form, momentum=0.5), torch.stack([2 * g, g]), g)
    close(step.update, 0.5 * g)


def test_after_rounds_without_answers_the_momentum_decays():
    """A void round makes no step, but Delta_t = momentum Delta_{t-1}; the next round projects off that."""
    D, g = stack()
    rule = FedDPC(lam=0.0, momentum=0.5)
    server = rule.on_empty_round(rule.on_empty_round({"delta": g}))
    assert torch.equal(server["delta"], 0.25 * g)
    step = rule.aggregate(torch.zeros_like(g), server, {"delta": D}, cohort(len(D)))
    close(step.update, direction(0.0, D, g) + 0.125 * g)
    assert not FedDPC().on_empty_round({"delta": g})["delta"].any()


def test_a_run_goes_through_void_rounds_with_its_momentum():
    """The engines call it too: after rounds without clients the memory is a power of the momentum times it."""
    rule = FedDPC(momentum=0.5)
    state, _ = run_rounds(setting_for(rule), rule, Loop(), 2)
    w, g = state.w.clone(), state.server["delta"].clone()
    assert g.any()
    nobody = StepOutcome(torch.zeros(0, dtype=torch.bool), cohort(0), None, {})
    for _ in range(2):
        state.apply(rule, nobody, np.array([], dtype=np.int64))
    assert torch.equal(state.w, w)
    assert torch.equal(state.server["delta"], 0.25 * g)


def test_a_robust_rule_and_privacy_add_the_momentum_once():
    """They hand rows to `combine`: the momentum is added after the mean, and never projected out."""
    D, g = stack()
    rows = {"delta": torch.stack(list(FedDPC().transform({"delta": g}, {"delta": D}, cohort(5))[0]["delta"]))}
    w = torch.zeros_like(g)
    plain = FedDPC().combine(w, {"delta": g}, rows, cohort(5))
    step = FedDPC(momentum=0.9).combine(w, {"delta": g}, rows, cohort(5))
    close(step.update, plain.update + 0.9 * g)


def test_neither_ablation_is_fedavg():
    rule = FedDPC(projection=False, scaling=False)
    np.testing.assert_allclose(trajectory(rule, **Q4), trajectory("fedavg", **Q4), atol=1e-14)


def test_hyper_parameters_outside_their_domain():
    with pytest.raises(BadInputError, match="scaling without projection"):
        FedDPC(projection=False)
    with pytest.raises(BadInputError, match="lam"):
        FedDPC(lam=-1.5)
    for momentum in (-0.1, 1.0, math.nan):
        with pytest.raises(BadInputError, match="momentum"):
            FedDPC(momentum=momentum)
    with pytest.raises(BadInputError, match="tau"):
        FedDPC(tau=0.0)
    with pytest.raises(BadInputError, match=r"did you mean 'streaming'\?"):
        methods.create("feddpc", form="stream")


def test_the_noise_floor_diagnostic():
    """methods.md 2(g): F - F* at round 10 on the synthetic problem, generator default_rng(0)."""
    rng = np.random.default_rng(0)
    curvature, centre = rng.uniform(0.5, 3, (100, 50)), rng.standard_normal((100, 50))
    schedule = [rng.choice(100, 10, replace=False).tolist() for _ in range(10)]
    best = (curvature * centre).sum(0) / curvature.sum(0)

    def gap(w):
        return 0.5 * (curvature * ((w - centre) ** 2 - (best - centre) ** 2)).sum(1).mean()

    common = {"curvature": curvature, "centre": centre, "w0": np.full(50, 3.0), "schedule": schedule, "client_lr": 0.05}
    for method, server_lr, expected in [
        ("fedavg", 0.05, 10.3),
        ("fedavg", 0.1, 0.85),
        (FedDPC(scaling=False), 0.05, 55),
        (FedDPC(lam=0.0), 0.05, 53),
        (FedDPC(lam=1.0), 0.05, 3.5),
        (FedDPC(lam=2.0), 0.05, 1.6),
        ("fedvarp", 0.05, 12.6),
    ]:
        assert gap(trajectory(method, **common, server_lr=server_lr, steps=2)[-1]) == pytest.approx(expected, rel=0.05)


def test_without_scaling_nothing_is_cut():
    rule = FedDPC(lam=-1.0, scaling=False, max_scale=0.5)
    g, D = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 2.0]])
    assert rule.direction(D, g, torch.ones(1))[0].tolist() == [0.0, 2.0]
