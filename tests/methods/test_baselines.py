"""The exact relations of methods.md 3, one method after the other, and the checklist of 7.3."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.methods.base import Cohort
from feddpc.quadratic import trajectory
from feddpc.round.server_step import apply_step_
from support import Q4, on_quadratics, run_rounds, small_setting

F64 = torch.float64
FULL = {**Q4, "schedule": [[0, 1, 2, 3]] * 12}
A, C, W0 = (np.array(Q4[k], dtype=float) for k in ("curvature", "centre", "w0"))
ETA, K = 0.1, 3


def path(name, problem=Q4, **hyper):
    return trajectory(methods.create(name, **hyper), **problem)


def same(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


def different(a, b):
    assert abs(a - b).max() > 1e-6


# FedAvg, 3.1 and 7.1


def test_fedavg_full_participation_closed_form():
    b = (1 - (1 - ETA * A) ** K) / ETA
    fixed = (b * C).sum(0) / b.sum(0)
    rate = 1 - ETA * b.mean(0)
    same(path("fedavg", FULL), [fixed + rate**t * (W0 - fixed) for t in range(13)])


def test_fedavg_one_step_is_gradient_descent():
    w, want = W0, [W0]
    for _ in range(12):
        w = w - ETA * (A * (w - C)).mean(0)
        want.append(w)
    same(path("fedavg", {**FULL, "steps": 1}), want)


def test_fedavg_server_rate_scales_the_step():
    slow, fast = (path("fedavg", {**Q4, "server_lr": lr})[1] - W0 for lr in (0.1, 0.25))
    same(fast, 2.5 * slow)


# FedProx, 3.2


def test_fedprox_closed_form_of_one_round():
    mu = 0.7
    q = 1 - ETA * (A + mu)
    D = A * (1 - q**K) / (ETA * (A + mu)) * (W0 - C)
    same(path("fedprox", mu=mu)[1], W0 - ETA * D[[0, 1]].mean(0))


@pytest.mark.parametrize("mu", [0.0, 0.5, 3.0])
def test_fedprox_one_step_is_fedavg(mu):
    same(path("fedprox", {**Q4, "steps": 1}, mu=mu), path("fedavg", {**Q4, "steps": 1}))


def test_fedprox_pulls_harder_with_larger_mu():
    moves = [np.linalg.norm(path("fedprox", mu=mu)[1] - W0) for mu in (0.0, 1.0, 5.0)]
    assert moves[0] > moves[1] > moves[2]


# FedExP, 3.3


def extrapolation(updates, **hyper):
    u = torch.tensor(updates, dtype=F64)
    m = len(u)
    cohort = Cohort(1, torch.arange(m), m, torch.full((m,), 1 / m, dtype=F64), torch.ones(m, dtype=F64), 1.0, 1.0)
    step = methods.create("fedexp", **hyper).aggregate(torch.zeros(u.shape[1], dtype=F64), {}, {"delta": u}, cohort)
    return float(step.notes["extrapolation"]), -apply_step_(torch.zeros(u.shape[1], dtype=F64), step).numpy()


@pytest.mark.parametrize(("m", "eta"), [(10, 5.0), (4, 2.0), (2, 1.0), (1, 1.0)])
def test_fedexp_orthogonal_updates(m, eta):
    got, step = extrapolation(np.eye(m) * 3, eps=0.0)
    assert got == pytest.approx(eta)
    same(step, eta * 3 * np.ones(m) / m)


def test_fedexp_identical_updates_are_averaged():
    assert extrapolation([[1.0, 2.0]] * 5, eps=0.0)[0] == 1


@pytest.mark.parametrize("degrees", [0, 60, 90, 120, 170])
def test_fedexp_two_updates_at_an_angle(degrees):
    phi = np.radians(degrees)
    eta, _ = extrapolation([[1.0, 0.0], [np.cos(phi), np.sin(phi)]], eps=0.0)
    assert eta == pytest.approx(max(1, 1 / (1 + np.cos(phi))))


def test_fedexp_scales_and_limits():
    u = np.random.default_rng(0).standard_normal((3, 4))
    same(extrapolation(7 * u, eps=49 * 0.2)[1], 7 * extrapolation(u, eps=0.2)[1])
    same(extrapolation(u, eps=1e12)[1], u.mean(0))
    same(extrapolation([[1.0, 0.0], [-1.0, 0.0]], eps=0.0)[1], [0, 0])
    assert extrapolation(u, eps=0.1, eps_times_m=True)[0] == pytest.approx(max(1, extrapolation(u, eps=0.3)[0]))


# FedGA, 3.4


def test_fedga_fresh_closed_form_of_one_round():
    beta, S = 0.3, [0, 1]
    g = A[S] * (W0 - C[S])
    start = W0 + beta * (g - g.mean(0))
    end = C[S] + (1 - ETA * A[S]) ** K * (start - C[S])
    same(path("fedga", variant="fresh", beta=beta)[1], end.mean(0))


def test_fedga_identical_clients_are_not_displaced():
    twins = {**Q4, "curvature": [Q4["curvature"][0]] * 4, "centre": [Q4["centre"][0]] * 4}
    same(path("fedga", twins, variant="fresh", beta=0.5), path("fedavg", twins))


def test_fedga_stale_by_hand():
    """Round 2 of a two-client problem: displaced by beta (h_j - hbar), measured from the displaced start."""
    problem = {**Q4, "schedule": [[0, 1], [0, 1]]}
    beta = 0.2
    b = (1 - (1 - ETA * A[:2]) ** K) / ETA
    D = b * (W0 - C[:2])
    w1 = W0 - ETA * D.mean(0)
    h = D / K
    start = w1 + beta * (h - h.mean(0))
    D2 = b * (start - C[:2])
    same(path("fedga", problem, variant="stale", beta=beta)[2], w1 - ETA * D2.mean(0))


# FedCM, 3.5


def test_fedcm_first_round_shrinks_the_local_rate():
    alpha = 0.3
    u = (1 - (1 - ETA * alpha * A[:2]) ** K) * (W0 - C[:2])
    same(path("fedcm", alpha=alpha)[1], W0 - u.mean(0))


def test_fedcm_closed_form_of_a_later_round():
    alpha, S1, S2 = 0.3, [0, 1], [2, 3]
    u1 = (1 - (1 - ETA * alpha * A[S1]) ** K) * (W0 - C[S1])
    w1, M = W0 - u1.mean(0), u1.mean(0) / (ETA * K)
    u2 = ((w1 - C[S2]) + (1 - alpha) * M / (alpha * A[S2])) * (1 - (1 - ETA * alpha * A[S2]) ** K)
    same(path("fedcm", alpha=alpha)[2], w1 - u2.mean(0))


# FedVARP and ClusterFedVARP, 3.6


@pytest.mark.parametrize("name", ["fedvarp", "clusterfedvarp"])
def test_fedvarp_full_participation_is_fedavg(name):
    hyper = {"clusters": 2} if name == "clusterfedvarp" else {}
    same(path(name, FULL, **hyper), path("fedavg", FULL))


def test_singleton_clusters_are_fedvarp():
    same(path("clusterfedvarp", clusters=4), path("fedvarp"))
    different(path("clusterfedvarp", clusters=((0, 2), (1, 3))), path("fedvarp"))


def test_a_cluster_of_which_three_take_part_is_exact_in_float64():
    """A third is no sum of powers of two: a share computed in float32 would be off by 1e-8."""
    w, D = W0, lambda w, j: (1 - (1 - ETA * A[j]) ** K) / ETA * (w - C[j])
    y, want = np.zeros((2, 3)), [W0]
    for round in ([0, 1, 2], [0, 3], [1, 2, 3]):
        cluster = [0, 0, 0, 1]
        updates = {j: D(w, j) for j in round}
        v = 0.75 * y[0] + 0.25 * y[1] + np.mean([updates[j] - y[cluster[j]] for j in round], axis=0)
        for c in (0, 1):
            members = [updates[j] for j in round if cluster[j] == c]
            y[c] = np.mean(members, axis=0) if members else y[c]
        w = w - ETA * v
        want.append(w)
    problem = {**Q4, "schedule": [[0, 1, 2], [0, 3], [1, 2, 3]]}
    same(path("clusterfedvarp", problem, clusters=((0, 1, 2), (3,))), want, 1e-14)


@pytest.mark.parametrize(
    ("clusters", "limit", "cohort"), [(8, "fedvarp", 4), (8, "fedavg", 8), (3, "fedavg", 8)], ids=str
)
def test_limits_of_clusters_hold_under_sample_weights(clusters, limit, cohort):
    """One client per cluster is FedVARP, and full participation is FedAvg, for clients of very unequal sizes."""
    setting = small_setting(weighting="samples", cohort=cohort)
    one = run_rounds(setting, methods.create("clusterfedvarp", clusters=clusters), Loop(), 6)[0].w
    other = run_rounds(setting, methods.create(limit), Loop(), 6)[0].w
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    uniform = run_rounds(small_setting(cohort=cohort), methods.create(limit), Loop(), 6)[0].w
    assert not torch.allclose(one, uniform, atol=1e-5)


def test_fedvarp_mean_memory_is_the_mean_of_memories():
    from feddpc import sampling
    from feddpc.data.partition import Partition
    from feddpc.quadratic import Quadratic, quadratic_experiment
    from feddpc.round.round import run_round
    from feddpc.round.state import RunState

    method = methods.create("fedvarp")
    federation = quadratic_experiment(
        Quadratic(torch.tensor(A), torch.tensor(C)),
        Partition.from_lists([[j] for j in range(4)]),
        sampling.make("bernoulli", population=4, cohort=2, seed=3),
        torch.tensor(W0),
        config=Config(lr=0.1, server_lr=0.1, epochs=3),
    )
    progress = RunState.begin(method, torch.tensor(W0), 4)
    for _ in range(30):
        run_round(federation, method, Loop(), progress)
        table = progress.slots.read(np.arange(4))["y"]
        torch.testing.assert_close(progress.server["ybar"], table.mean(0), rtol=0, atol=1e-14)


def test_fedvarp_settles_at_the_full_participation_fixed_point():
    rng = np.random.default_rng(0)
    schedule = [sorted(rng.choice(4, 2, replace=False).tolist()) for _ in range(600)]
    problem = {**Q4, "schedule": schedule}
    same(path("fedvarp", problem)[-1], [0.0924719, 0.0924719, 0.0159868], 1e-6)
    assert abs(path("fedavg", problem)[-100:] - [0.0924719, 0.0924719, 0.0159868]).max() > 0.01


def test_clusters_must_name_every_client_once():
    with pytest.raises(BadInputError, match="each of the 4 clients exactly once"):
        path("clusterfedvarp", clusters=((0, 1), (2,)))
    with pytest.raises(BadInputError, match="there are 4 clients"):
        path("clusterfedvarp", clusters=9)


# All of them


@pytest.mark.parametrize("name", methods.names())
def test_the_order_of_clients_does_not_matter(name):
    method = methods.create(name, **({"clusters": 2} if name == "clusterfedvarp" else {}))
    gen = torch.Generator().manual_seed(0)
    u, y, g = (torch.randn(*shape, generator=gen, dtype=F64) for shape in ((4, 6), (4, 6), (6,)))
    w = torch.zeros(6, dtype=F64)
    server = {k: g if v.shape == g.shape else v for k, v in method.init_server(w, 4).items()}
    made = []
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):
        slots = dict.fromkeys(method.init_slot(w), y[order])
        weights, steps = torch.full((4,), 0.25, dtype=F64), torch.arange(1.0, 5.0, dtype=F64)[order]
        cohort = Cohort(3, order, 4, weights, steps, 0.1, 0.2, slots)
        up = dict.fromkeys(("delta", "change", "sent"), u[order])
        made.append(method.aggregate(w, server, up, cohort))
    same(apply_step_(w.clone(), made[0]), apply_step_(w.clone(), made[1]))
    for key, value in made[0].server.items():
        same(value, made[1].server[key])


def test_fedexp_may_evaluate_the_mean_of_two_iterates():
    method = methods.create("fedexp", evaluate="pair")
    w = torch.tensor([1.0, 2.0], dtype=F64)
    server = method.init_server(w, 3)
    same(method.evaluated(w, server), w)
    cohort = Cohort(1, torch.arange(1), 3, torch.ones(1, dtype=F64), torch.ones(1, dtype=F64), 1.0, 1.0)
    step = method.aggregate(w, server, {"delta": torch.tensor([[2.0, 0.0]], dtype=F64)}, cohort)
    same(method.evaluated(apply_step_(w.clone(), step), step.server), [0.0, 2.0])


@given(seed=st.integers(0, 10_000), d=st.integers(1, 6), n=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_identical_clients_with_zero_gradient_stay(seed, d, n):
    """At the common optimum nothing moves, whatever the method."""
    rng = np.random.default_rng(seed)
    a, c = rng.uniform(0.5, 2, (n, d)), np.tile(rng.standard_normal(d), (n, 1))
    for name in methods.names():
        method = methods.create(name, **({"clusters": 1} if name == "clusterfedvarp" else {}))
        if not on_quadratics(method):
            continue
        got = trajectory(
            method,
            curvature=a,
            centre=c,
            w0=c[0],
            schedule=[[0], list(range(n))],
            client_lr=0.1,
            server_lr=0.1,
            steps=2,
        )
        same(got, np.tile(c[0], (3, 1)), 1e-14)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("fedprox", {"mu": -1.0}, "mu >= 0"),
        ("fedexp", {"eps": -1e-3}, "eps >= 0"),
        ("fedga", {"beta": -1.0}, "beta >= 0"),
        ("fedga", {"variant": "frozen"}, "Valid: fresh, stale"),
        ("fedcm", {"alpha": 0.0}, "0 < alpha <= 1"),
        ("fedcm", {"alpha": 1.1}, "0 < alpha <= 1"),
        ("fedcm", {"alpha": "much"}, "'much' is a str, expected float"),
        ("fedcm", {"alfa": 0.1}, "did you mean 'alpha'"),
        ("fedavg", {"mu": 0.1}, "fedavg has no hyper-parameters"),
        ("clusterfedvarp", {"clusters": 0}, "at least one cluster"),
        ("fedexp", {"eps_times_m": 1}, "expected bool"),
        ("fedprox", {"mu": float("inf")}, "must be a finite number"),
        ("feddpc", {"lam": float("nan")}, "must be a finite number"),
    ],
)
def test_domains(name, hyper, message):
    with pytest.raises(BadInputError, match=message):
        methods.create(name, **hyper)


def test_unknown_method():
    with pytest.raises(BadInputError, match=r"unknown method 'fedavgg': did you mean 'fedavg'"):
        methods.create("fedavgg")
