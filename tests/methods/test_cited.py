"""The exact relations of the methods that correct clients by what they remember: SCAFFOLD, FedDyn and their kin."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.quadratic import trajectory
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from support import Q4, run_rounds, small_setting

ALL4 = [[0, 1, 2, 3]]
A, C, W0 = (np.array(Q4[k], dtype=np.float64) for k in ("curvature", "centre", "w0"))
OPTIMUM = (A * C).sum(0) / A.sum(0)


def path(name, hyper=None, **changes):
    return trajectory(methods.create(name, **(hyper or {})), **{**Q4, **changes})


def same(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def table_mean(memory, key, population):
    """The mean over ALL clients of a memory that is zero for those never seen."""
    return memory.export()[1][key].sum(0) / population


# SCAFFOLD


def test_scaffold_both_options_agree_after_one_full_batch_step():
    same(path("scaffold", {"option": "I"}, steps=1), path("scaffold", {"option": "II"}, steps=1))


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_is_fedavg_with_everybody_and_one_step(option):
    everybody = {"schedule": ALL4 * 6, "steps": 1}
    same(path("scaffold", {"option": option}, **everybody), path("fedavg", **everybody))


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_identical_clients(option):
    """FedAvg when all take part; with sampling, an unseen c_j = 0 differs from c."""
    alike = {"curvature": [Q4["curvature"][0]] * 4, "centre": [Q4["centre"][0]] * 4}
    full = {**alike, "schedule": ALL4 * 5}
    same(path("scaffold", {"option": option}, **full), path("fedavg", **full))
    assert np.abs(path("scaffold", {"option": option}, **alike) - path("fedavg", **alike)).max() > 1e-3


@pytest.mark.parametrize("hyper", [{"option": "I"}, {"option": "II"}, {"warm": True}])
def test_scaffolds_c_is_the_mean_of_all_variates(hyper):
    method = methods.create("scaffold", **hyper)
    progress, _ = run_rounds(small_setting(), method, Loop(), 5)
    torch.testing.assert_close(progress.server["c"], table_mean(progress.clients, "c", 8), rtol=0, atol=1e-14)


def test_scaffold_stays_at_the_optimum_once_its_variates_are_gradients():
    ends = path("scaffold", {"warm": True}, w0=OPTIMUM)
    same(ends, np.tile(OPTIMUM, (5, 1)))
    assert np.abs(path("fedavg", w0=OPTIMUM) - OPTIMUM).max() > 0.01


def test_scaffolds_update_in_closed_form():
    """u_j = ((w - x_j*) + (c - c_j)/a)(1 - (1 - eta a)^K), in round 2 with everybody in round 1."""
    one, two = path("scaffold", schedule=[*ALL4, [2]])[1:]
    b = 1 - (1 - 0.1 * A) ** 3
    c_j = b * (W0 - C) / (3 * 0.1)  # option II after round 1: the mean gradient along the path
    u = ((one - C) + (c_j.mean(0) - c_j) / A) * b
    same(two, one - u[2])


def test_scaffold_divides_by_this_rounds_rate():
    """With a decayed rate option II is still the mean raw gradient: c_j equals option I's at K = 1."""
    settings_ = [small_setting(lr_decay=0.5, epochs=1, batch_size=64) for _ in range(2)]
    ends = [
        run_rounds(s, methods.create("scaffold", option=o), Loop(), 4)[0].w
        for s, o in zip(settings_, ("I", "II"), strict=True)
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


# FedDyn


def test_feddyns_h_is_the_mean_over_all_clients():
    progress, _ = run_rounds(small_setting(), methods.create("feddyn"), Loop(), 5)
    torch.testing.assert_close(progress.server["H"], table_mean(progress.clients, "h", 8), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("schedule", "factor"), [([[0, 1]], 1.5), (ALL4, 2.0), ([[3]], 1.25)])
def test_feddyn_at_alpha_zero_is_not_fedavg(schedule, factor):
    step = path("fedavg", schedule=schedule)[1] - W0
    same(path("feddyn", {"alpha": 1e-9}, schedule=schedule)[1], W0 + factor * step, atol=1e-8)


def test_feddyns_recurrence_for_one_client():
    """alpha -> 0: e_{t+1} = (2 - 2b) e_t - (1 - b) e_{t-1}, e_1 = (1 - 2b) e_0."""
    alone = {"curvature": [[2.0]], "centre": [[0.0]], "w0": [1.0], "schedule": [[0]] * 8}
    e = path("feddyn", {"alpha": 1e-10}, **alone)[:, 0]
    b = 1 - (1 - 0.2) ** 3
    assert e[1] == pytest.approx(1 - 2 * b, abs=1e-8)
    for t in range(1, 8):
        assert e[t + 1] == pytest.approx((2 - 2 * b) * e[t] - (1 - b) * e[t - 1], abs=1e-7)


def test_feddyns_exact_minimiser():
    """With local training to the end, w_j = (a c + alpha w + l_j)/(a + alpha), and l_j becomes grad F_j(w_j)."""
    alpha = 0.3
    method = methods.create("feddyn", alpha=alpha)
    federation, progress = quadratic_federation(method, steps=800)
    run_round(federation, method, Loop(), progress)
    h_j = progress.clients.export()[1]["h"].numpy()  # of clients 0 and 1, whose l was 0 before
    w_j = (A[:2] * C[:2] + alpha * W0) / (A[:2] + alpha)
    same(W0 + h_j, w_j, atol=1e-10)
    same(-alpha * h_j, A[:2] * (w_j - C[:2]), atol=1e-10)


@pytest.mark.parametrize("name", ["feddyn", "feddc"])
def test_evaluating_the_clients_mean(name):
    """evaluate = clients: the mean over ALL clients of their last models, w_0 for those never seen."""
    method = methods.create(name, evaluate="clients")
    federation, progress = quadratic_federation(method)
    run_round(federation, method, Loop(), progress)
    last = np.tile(W0, (4, 1))
    last[:2] = progress.slots.export()[1]["last"].numpy()
    same(method.evaluated(progress.w, progress.server).numpy(), last.mean(0))
    plain = path(name)
    same(trajectory(method, **Q4), plain)  # what is evaluated does not change what is trained
    assert np.abs(last[:2] - W0).max() > 0.1


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_feddyns_domain(alpha):
    with pytest.raises(BadInputError, match=r"feddyn: alpha = .* outside its domain: alpha > 0"):
        methods.create("feddyn", alpha=alpha)


# FedSpeed


@pytest.mark.parametrize("hyper", [{"alpha": 0.0}, {"rho": 0.0}])
def test_fedspeed_without_perturbation_is_feddyn(hyper):
    same(path("fedspeed", {"lam": 4.0, **hyper}), path("feddyn", {"alpha": 0.25}))


def test_fedspeeds_two_servers_agree_with_everybody():
    full = {"schedule": ALL4 * 6}
    same(path("fedspeed", {"server": "paper"}, **full), path("fedspeed", {"server": "code"}, **full))
    assert np.abs(path("fedspeed", {"server": "paper"}) - path("fedspeed")).max() > 0.1


def test_fedspeeds_client_is_fedavgs_without_its_terms():
    method = methods.create("fedspeed", lam=1e12, rho=0.0)
    federation, progress = quadratic_federation(method)
    run_round(federation, method, Loop(), progress)
    moves = progress.clients.export()[1]["p"].numpy()
    same(moves.mean(0), path("fedavg")[1] - W0)


def test_fedspeed_at_a_stationary_point_stays():
    """A zero gradient has no direction: the perturbation is zero, not NaN."""
    centre = {"centre": [[0.5, -0.5, 1.0]] * 4}
    same(path("fedspeed", **centre), np.tile(W0, (5, 1)))


# FedAMD


class Everybody(methods.get("fedamd")):
    """All are miners."""

    def train_mask(self, cohort):
        return np.ones(len(cohort.clients), dtype=bool)


def test_fedamd_with_one_step_follows_the_mean_gradient():
    gradient = (A * (W0 - C)).mean(0)
    ends = trajectory(Everybody(), **{**Q4, "steps": 1})
    for t in range(4):  # V is never measured again, so every round takes the same step
        same(ends[t + 1], W0 - (t + 1) * 0.1 * gradient)


def test_fedamd_with_anchors_only_never_moves():
    same(path("fedamd", {"p": 1.0}), np.tile(W0, (5, 1)))
    assert np.abs(path("fedamd", {"p": 0.0})[1] - W0).max() > 0.1


def test_fedamd_sequential_with_everybody_is_gradient_descent():
    """All measure, then all make one step: w <- w - eta grad F(w) every second round."""
    ends = path("fedamd", {"anchors": "sequential", "every": 2}, schedule=ALL4 * 6, steps=1)
    w = W0
    for t in range(0, 6, 2):
        same(ends[t + 1], w)
        w = w - 0.1 * (A * (w - C)).mean(0)
        same(ends[t + 2], w)


def test_fedamds_roles_are_drawn_with_probability_p_and_do_not_depend_on_the_others():
    method = methods.create("fedamd", p=0.3)
    cohorts = [
        methods.Cohort(
            round=t, clients=torch.arange(40), population=40, weights=torch.ones(40) / 40, steps=torch.ones(40),
            client_lr=0.1, server_lr=0.1, seed=3,
        )
        for t in range(1, 101)
    ]  # fmt: skip
    anchors = np.array([~method.train_mask(c) for c in cohorts])
    assert abs(anchors.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 4000)
    alone = methods.Cohort(
        round=7, clients=torch.tensor([11]), population=40, weights=torch.ones(1), steps=torch.ones(1),
        client_lr=0.1, server_lr=0.1, seed=3,
    )  # fmt: skip
    assert method.train_mask(alone)[0] != anchors[6, 11]


def test_fedamds_mean_is_over_all_clients_and_memories_stay_gradients():
    method = methods.create("fedamd", p=0.5)
    progress, records = run_rounds(small_setting(), method, Loop(), 5)
    torch.testing.assert_close(progress.server["Vbar"], table_mean(progress.clients, "V", 8), rtol=0, atol=1e-14)
    assert {r.notes["miners"] for r in records} - {0.0, 4.0}  # mixed rounds happened
    assert all(np.isfinite(r.train_loss) for r in records if r.notes["miners"])


# FedDC


class Frozen(methods.get("feddc")):
    """FedDC whose variates stay zero."""

    def finish(self, y, ctx):
        up, own = super().finish(y, ctx)
        return {**up, "change": torch.zeros_like(y)}, {**own, "c": torch.zeros_like(y)}


def test_feddc_with_frozen_variates_is_feddyn():
    same(trajectory(Frozen(alpha=0.05), **Q4), path("feddyn", {"alpha": 0.05}))


def test_feddcs_sums_are_over_all_clients():
    progress, _ = run_rounds(small_setting(), methods.create("feddc"), Loop(), 5)
    for key in ("c", "h"):
        torch.testing.assert_close(progress.server[key], table_mean(progress.clients, key, 8), rtol=0, atol=1e-14)


# MIFA


def test_mifa_with_everybody_is_fedavg():
    full = {"schedule": ALL4 * 5}
    same(path("mifa", **full), path("fedavg", **full))


def test_mifas_first_round_is_a_share_of_fedavgs():
    same(path("mifa")[1] - W0, 0.5 * (path("fedavg")[1] - W0))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mifa_is_sag_where_fedvarp_is_saga(seed):
    """ybar + 1/N sum(D - y) against ybar + 1/m sum(D - y), for random tables and cohorts."""
    rng = torch.Generator().manual_seed(seed)
    N, m, d = 7, 3, 4
    table = torch.randn(N, d, generator=rng, dtype=torch.float64)
    ids = torch.randperm(N, generator=rng)[:m]
    D = torch.randn(m, d, generator=rng, dtype=torch.float64)
    ybar, w = table.mean(0), torch.zeros(d, dtype=torch.float64)
    common = {
        "round": 3, "clients": ids, "population": N, "weights": torch.full((m,), 1 / m, dtype=torch.float64),
        "steps": torch.ones(m), "client_lr": 0.5, "server_lr": 0.5,
    }  # fmt: skip
    up = {"delta": 0.5 * D}
    sag = methods.create("mifa").aggregate(w, {"Gbar": ybar}, up, methods.Cohort(**common, slots={"G": table[ids]}))
    saga = methods.create("fedvarp").aggregate(w, {"ybar": ybar}, up, methods.Cohort(**common, slots={"y": table[ids]}))
    change = (D - table[ids]).sum(0)
    torch.testing.assert_close(sag.update, ybar + change / N, rtol=0, atol=1e-14)
    torch.testing.assert_close(saga.update, ybar + change / m, rtol=0, atol=1e-14)


def test_mifa_waits_for_everybody():
    """The model rests until the last client came, and goes in the next round with a full table."""
    schedule = [[0, 1], [1, 2], [3], [0, 3], [2]]
    ends = path("mifa", {"table": "wait"}, schedule=schedule)
    same(ends[:4], np.tile(W0, (4, 1)))
    same(ends[4], path("fedavg", schedule=ALL4)[1])  # all rows were measured at w_0
    assert np.abs(ends[5] - ends[4]).max() > 1e-3


# What is refused


@pytest.mark.parametrize(
    ("name", "hyper", "domain"),
    [
        ("fedspeed", {"lam": 0.0}, "lam > 0"),
        ("fedspeed", {"rho": -0.1}, "rho >= 0"),
        ("fedspeed", {"alpha": 1.5}, "0 <= alpha <= 1"),
        ("fedamd", {"p": 1.5}, "0 <= p <= 1"),
        ("fedamd", {"every": 1}, "every >= 2"),
        ("feddc", {"alpha": -0.1}, "alpha >= 0"),
    ],
)
def test_domains(name, hyper, domain):
    with pytest.raises(BadInputError) as error:
        methods.create(name, **hyper)
    assert domain in str(error.value)
    assert name in str(error.value)


def quadratic_federation(method, steps=3):
    """The federation of Q4, to look inside."""
    from feddpc import sampling
    from feddpc.data.partition import Partition
    from feddpc.quadratic import Quadratic, quadratic_experiment

    a, c, w = (torch.tensor(x) for x in (A, C, W0))
    federation = quadratic_experiment(
        Quadratic(a, c),
        Partition.from_lists([[j] for j in range(4)]),
        sampling.make("fixed", population=4, cohort=4, seed=0, schedule=Q4["schedule"]),
        w,
        config=Config(lr=0.1, server_lr=0.1, epochs=steps),
    )
    return federation, RunState.begin(method, w, 4)


# Weights by samples


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("scaffold", {"option": "I"}),
        ("scaffold", {"option": "II"}),
        ("feddyn", {"alpha": 2.0}),
        ("fedspeed", {"rho": 0.0, "lam": 1.0}),
        ("feddc", {}),
        ("fedamd", {"anchors": "sequential", "every": 2}),
    ],
)
def test_with_weights_by_samples_the_fixed_point_is_the_weighted_optimum(name, hyper):
    """Sums over all clients count each with its share of the data, as the participants' mean does."""
    method = methods.create(name, **hyper)
    federation, progress = weighted_federation(method)
    for _ in range(120):
        run_round(federation, method, Loop(), progress)
    sizes = np.array([1, 2, 3, 6])[:, None]
    same(progress.w.numpy(), (sizes * A * C).sum(0) / (sizes * A).sum(0), atol=1e-10)


@pytest.mark.parametrize("name", ["mifa", "fedvarp"])
def test_with_weights_by_samples_everybody_is_still_fedavg(name):
    ends = []
    for method in (methods.create(name), methods.create("fedavg")):
        federation, progress = weighted_federation(method)
        for _ in range(5):
            run_round(federation, method, Loop(), progress)
        ends.append(progress.w)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_memories_and_their_sums_agree_in_float32_too():
    """The client adds up what it sends, not two large numbers: H and the mean of h differ by rounding of h alone."""
    for name, key, own in (("feddyn", "H", "h"), ("fedspeed", "P", "p")):
        progress, _ = run_rounds(small_setting(precision="float32"), methods.create(name), Loop(), 30)
        total = table_mean(progress.clients, own, 8).double()
        assert float((progress.server[key] - total).norm() / total.norm()) < 1e-6


def weighted_federation(method):
    """Q4 with clients of 1, 2, 3 and 6 equal samples each, one local step of all of them, everybody present."""
    from feddpc import sampling
    from feddpc.data.partition import Partition
    from feddpc.quadratic import Quadratic, quadratic_experiment

    sizes = [1, 2, 3, 6]
    a, c = (torch.tensor(np.repeat(x, sizes, axis=0)) for x in (A, C))
    ends = np.cumsum([0, *sizes])
    lists = [list(range(ends[j], ends[j + 1])) for j in range(4)]
    federation = quadratic_experiment(
        Quadratic(a, c),
        Partition.from_lists(lists),
        sampling.make("uniform", population=4, cohort=4, seed=0),
        torch.tensor(W0),
        config=Config(lr=0.1, server_lr=0.1, epochs=3, batch_size=6, weighting="samples"),
    )
    return federation, RunState.begin(method, torch.tensor(W0), 4)
