"""Every server rule on updates that are zero, tiny, huge, parallel, repeated or alone: finite, bounded, equivariant."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.methods.base import ClientContext, Cohort, Method
from feddpc.methods.feddpc import FedDPC
from feddpc.round.server_step import apply_step_
from support import VARIANTS

F32, F64 = torch.float32, torch.float64
CLIENT_LR, SERVER_LR, POPULATION = 0.1, 0.1, 20
#: Times the longest update: what no method's step exceeds from its initial state; 2 is FedDPC's 1 + lambda.
BOUND = 2.0
ALL = pytest.mark.parametrize("name", VARIANTS)
#: They divide each coordinate by its own size, so that steps are no multiples of updates and do not turn with them.
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
LINEAR = pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ADAPTIVE])


@st.composite
def stacks(draw):
    """Updates ``[m, d]`` and a direction ``[d]``; rows are free, zero, parallel to it, nearly so, or repeated."""
    d = draw(st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 1000, 10_000])))
    m = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([F32, F64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    g = rng.standard_normal(d)
    rows = []
    for _ in range(m):
        kind = draw(st.sampled_from(["free", "free", "zero", "parallel", "near", "repeated"]))
        row = rng.standard_normal(d)
        if kind == "zero":
            row = np.zeros(d)
        elif kind == "parallel":
            row = g * rng.choice([-2.0, 1.0])
        elif kind == "near":
            row = g + rng.standard_normal(d) * 10.0 ** -rng.integers(1, 8)
        elif kind == "repeated" and rows:
            row = rows[-1]
        rows.append(row)
    size = draw(st.sampled_from([1.0, 1e-30, 1e30]))
    other = draw(st.sampled_from([1.0, 1.0, 1e-30, 1e30]))
    x = torch.tensor(np.array(rows)) * size
    x[-1] *= other / size  # and not all need be alike
    return x.to(dtype), torch.tensor(g).to(dtype)


class Server:
    """A method's server half, fed with updates: its state, and what clients would send."""

    def __init__(self, method: Method, like: torch.Tensor) -> None:
        self.method, self.w = method, torch.zeros_like(like)
        self.server = method.init_server(self.w, POPULATION)
        self.slots = method.init_slot(self.w)
        self.own = method.init_client(self.w)

    def cohort(self, m: int, round: int = 1) -> Cohort:
        return Cohort(
            round=round,
            clients=torch.arange(m),
            population=POPULATION,
            weights=torch.full((m,), 1 / m, dtype=F64),
            steps=torch.ones(m, dtype=F64),
            client_lr=CLIENT_LR,
            server_lr=SERVER_LR,
            slots={k: v.expand(m, *v.shape).clone() for k, v in self.slots.items()},
        )

    def step(self, x_md: torch.Tensor, round: int = 1) -> torch.Tensor:
        """Let clients send ``x_md``; return by how much the model moved, with the server's memory moved on."""
        cohort = self.cohort(len(x_md), round)
        probed = {"g": torch.zeros_like(self.w)} if self.method.probes else {}
        reported = {k: v.expand(len(x_md), *v.shape) for k, v in probed.items()} if self.method.reports else {}
        down = self.method.broadcast(self.w, self.server, reported, cohort)
        steps = torch.ones((), dtype=self.w.dtype)
        sent = []
        for x in x_md:
            ctx = ClientContext(self.w, down, self.own | probed, CLIENT_LR, steps)
            start = self.method.start(ctx)
            y = start - x if start.ndim == 1 else torch.cat([(start[0] - x)[None], start[1:]])
            sent.append(self.method.finish(y, ctx)[0])
        up = {k: torch.stack([s[k] for s in sent]) for k in sent[0]}
        made = self.method.aggregate(self.w, self.server, up, cohort)
        before = self.w.clone()
        apply_step_(self.w, made)
        self.server = made.server
        self.made = made
        return self.w - before


def longest(x_md: torch.Tensor) -> float:
    return float(x_md.double().norm(dim=1).max())


def tame(name: str, problem: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """FedExP divides by the mean's length, which nothing but eps bounds: for it, no updates that cancel."""
    x, g = problem
    return (x.abs(), g) if name.startswith("fedexp") else (x, g)


@ALL
@given(stacks())
@settings(max_examples=25, deadline=None)
def test_finite_and_bounded(name, problem):
    """Two rounds, the second with a memory of the first: the model, the memory and the reports stay finite."""
    x, g = tame(name, problem)
    method, server = VARIANTS[name], Server(VARIANTS[name], g)
    moved = server.step(x)
    # eta_g / eta_l = 1, so a mean moves by at most the longest update; FedDPC by (1 + lambda) times that.
    if name not in ADAPTIVE:
        assert float(moved.double().norm()) <= BOUND * longest(x) * (1 + 1e-5)
    server.w = torch.zeros_like(g)
    server.step(x.flip(0), round=2)
    for state in (server.server, server.made.slots, {"w": server.w}):
        assert all(bool(v.isfinite().all()) for v in state.values())
    assert all(np.isfinite(float(v)) for v in server.made.notes.values())
    assert server.w.dtype == x.dtype
    assert bool(method.evaluated(server.w, server.server).isfinite().all())


@ALL
@given(stacks(), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_the_order_of_clients_does_not_matter(name, problem, random):
    """ClusterFedVARP knows clients by their place; all others may be shuffled."""
    x, g = tame(name, problem)
    order = list(range(len(x)))
    random.shuffle(order)
    if name == "clusterfedvarp":
        order = list(range(len(x)))
    one, other = (Server(VARIANTS[name], g).step(rows) for rows in (x, x[order]))
    tolerance = (1e-5 if x.dtype == F32 else 1e-13) * BOUND * longest(x)
    torch.testing.assert_close(other, one, rtol=0, atol=tolerance)


@LINEAR
@given(stacks())
@settings(max_examples=15, deadline=None)
def test_turning_all_updates_turns_the_step(name, problem):
    """A reflection, which needs no matrix: every server rule uses sums and lengths only. Two rounds, in float64."""
    x, g = (t.double() for t in tame(name, problem))
    axis = torch.linspace(1, 2, len(g), dtype=F64)
    axis /= axis.norm()

    def turn(rows: torch.Tensor) -> torch.Tensor:
        return rows - 2 * (rows @ axis)[..., None] * axis

    if name.startswith("feddpc"):  # at a guard's threshold, rounding decides
        gen = torch.Generator().manual_seed(len(x))
        x = torch.randn(x.shape, generator=gen, dtype=F64) * float(x.abs().max() or 1.0)
    plain, turned = Server(VARIANTS[name], g), Server(VARIANTS[name], g)
    for round, rows in enumerate((x, x.flip(0) * 0.5), start=1):
        a, b = plain.step(rows, round), turned.step(turn(rows), round)
        size = BOUND * longest(x) * (10 if round == 2 else 1)
        torch.testing.assert_close(b, turn(a), rtol=0, atol=1e-9 * size)


@given(stacks(), st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from(["matrix", "streaming", "client"]))
@settings(max_examples=150, deadline=None)
def test_feddpc_keeps_its_promises(problem, lam, form):
    """methods.md 2(f), 2 and 3: orthogonal to the last update, and |v_j| <= (1 + lambda) |D_j|, whatever comes."""
    x, g = problem
    method = FedDPC(lam=lam, form=form, max_scale=10.0)
    server = Server(method, g)
    server.server = {"delta": g}
    moved = server.step(x, round=2).double()
    eps = 2e-6 if x.dtype == F32 else 1e-12
    assert float(moved.norm()) <= (1 + lam) * longest(x) * (1 + eps)
    along = float(moved @ (g.double() / g.double().norm()))
    # Relative to the longest row: the rows' parts along g cancel to rounding, times the largest factor.
    assert abs(along) <= eps * method.max_scale * longest(x)


@given(stacks())
@settings(max_examples=60, deadline=None)
def test_feddpc_lengths_and_descent(problem):
    """Properties 3 and 4, with the largest factor: |v_j| = min(|D_j| + |r_j|, 10 |r_j|), and <D_j, v_j> >= 0."""
    x, g = (t.double() for t in problem)
    rule = FedDPC(max_scale=10.0)
    for row in x:
        v = rule.direction(row[None], g, torch.ones(1, dtype=F64))[0]
        r = row - (row @ g) / (g @ g) * g
        r = r - (r @ g) / (g @ g) * g
        D, length = float(row.norm()), float(r.norm())
        expected = 0.0 if length <= 1e-6 * D else min(D + length, rule.max_scale * length)
        assert float(v.norm()) == pytest.approx(expected, rel=1e-6, abs=1e-9 * D)
        assert float(row @ v) >= -1e-12 * D * D


def test_fedexp_steps_no_farther_than_eps_allows():
    """Opposite updates: the mean is short, the step is |sum of squares| / (2 m (|mean|^2 + eps)) means."""
    x = torch.tensor([[1.0, 1e-9], [-1.0, 1e-9]], dtype=F64)
    moved = Server(methods.create("fedexp"), x[0]).step(x)
    assert float(moved.norm()) == pytest.approx(1e-9 * 2 / (2 * 2 * (1e-18 + 1e-3)), rel=1e-9)


@given(stacks())
@settings(max_examples=60, deadline=None)
def test_fedexp_is_its_formula_also_where_updates_cancel(problem):
    """The step is |mean| max(1, mean of squares / (2 (|mean|^2 + eps))), however long that is."""
    x, g = (t.double() for t in problem)
    mean = torch.full((len(x),), 1 / len(x), dtype=F64) @ x
    squares, square = float(x.square().sum(1).mean()), float(mean.square().sum())
    expected = square**0.5 * max(1.0, squares / (2 * (square + 1e-3)))
    assert float(Server(methods.create("fedexp"), g).step(x).norm()) == pytest.approx(expected, rel=1e-6, abs=1e-300)
