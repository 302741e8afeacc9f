"""Row algebra in few reads: the same numbers as block by block, and the kernels for a GPU."""

import numpy as np
import pytest
import torch

from feddpc.kernels import row_sums
from feddpc.methods import FedDPC, _algebra
from feddpc.methods._feddpc_stream import Stream
from support import DEVICE

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels need a GPU")
SIZES = [(1, 1), (3, 5), (10, 1024), (4, 3001), (2, 300_007)]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def drawn(m, d, dtype=torch.float64, device="cpu"):
    gen = torch.Generator().manual_seed(m * d)
    x, g = torch.randn(m, d, generator=gen, dtype=dtype), torch.randn(d, generator=gen, dtype=dtype)
    return x.to(device), g.to(device), torch.rand(m, generator=gen, dtype=torch.float64).to(device)


@pytest.fixture
def few_reads(monkeypatch):
    """The way of a GPU, on any machine."""
    monkeypatch.setattr(row_sums, "usable", lambda _: True)
    monkeypatch.setattr(_algebra, "_has_kernels", row_sums.fits)


@TYPES
@pytest.mark.parametrize(("m", "d"), SIZES)
def test_the_algebra_is_the_same(m, d, dtype, monkeypatch):
    x, g, c = drawn(m, d, dtype)
    plain = _algebra.row_dots(x, g), _algebra.row_squares(x), _algebra.weighted_sum(c, x), _algebra.residuals(x, g)
    sums = _algebra.residual_sum(c, plain[3].p_m, x, g)
    monkeypatch.setattr(_algebra, "_has_kernels", lambda _: True)
    few = _algebra.row_dots(x, g), _algebra.row_squares(x), _algebra.weighted_sum(c, x), _algebra.residuals(x, g)
    for a, b in zip(few[:2], plain[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)
    close = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(few[2], plain[2], **close)
    for name in ("p_m", "x2_m", "r2_m", "cosine_m", "g2"):
        torch.testing.assert_close(getattr(few[3], name), getattr(plain[3], name), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(_algebra.residual_sum(c, few[3].p_m, x, g), sums, **close)


@pytest.mark.parametrize("sin", [1.0, 1e-2, 1e-3, 1e-5, 1e-6])
def test_lengths_are_good_at_every_angle(sin, few_reads):
    d, gen = 20_000, torch.Generator().manual_seed(0)
    g, e = torch.randn(2, d, generator=gen, dtype=torch.float64)
    g /= g.norm()
    e = _algebra.project_out_(e, g)
    e = _algebra.project_out_(e / e.norm(), g)
    x = torch.stack([float(np.sqrt(1 - sin**2)) * g + sin * e, e])
    np.testing.assert_allclose(_algebra.residuals(x, g).r2_m.sqrt(), [sin, 1.0], rtol=1e-8)


@pytest.mark.parametrize("sin", [1.0, 1e-2, 1e-4])
def test_a_sum_of_residuals_needs_no_second_projection(sin, few_reads):
    """In float32, where it is made in float64 and rounded once."""
    x, g, c = drawn(5, 40_000, torch.float32)
    x = sin * x + 3 * g
    look = _algebra.residuals(x, g)
    assert look.clean
    made = FedDPC(max_scale=0).direction(x, g, c)[0].double()
    exact = FedDPC(max_scale=0).direction(x.double(), g.double(), c)[0]
    assert not _algebra.residuals(x.double(), g.double()).clean
    assert abs(float(made @ g.double())) < 1e-7 * float(made.norm() * g.norm())
    assert float((made - exact).norm()) < 1e-7 * float(exact.norm())


def test_zero_vectors(few_reads):
    x, zero = torch.ones(2, 3), torch.zeros(3)
    look = _algebra.residuals(x, zero)
    assert look.p_m.tolist() == look.cosine_m.tolist() == [0, 0]
    assert look.r2_m.tolist() == [3, 3]
    assert _algebra.project_out_(x[0].clone(), zero).tolist() == [1, 1, 1]


@pytest.mark.parametrize("hyper", [{}, {"guard": "exclude", "tau": 0.9}, {"scaling": False}, {"lam": 0.0}], ids=str)
def test_feddpcs_direction_is_the_same(hyper, monkeypatch):
    x, g, c = drawn(6, 4000)
    rule = FedDPC(**hyper)
    x[1] = 2 * g + 1e-7 * x[1]
    plain, notes = rule.direction(x, g, c)
    monkeypatch.setattr(_algebra, "_has_kernels", lambda _: True)
    few, told = rule.direction(x, g, c)
    torch.testing.assert_close(few, plain, rtol=0, atol=1e-9)
    assert {k: float(v) for k, v in told.items()} == pytest.approx({k: float(v) for k, v in notes.items()}, rel=1e-6)
    assert abs(float(few @ g)) < 1e-9 or hyper.get("scaling") is False
    stream = Stream(rule, g)
    for row, weight in zip(x, c, strict=True):
        stream.add(row, weight)
    if rule.guard != "exclude":
        torch.testing.assert_close(stream.result()[0] * c.sum(), few, rtol=0, atol=1e-9)


def test_within_vmap_the_plain_way_is_taken(few_reads):
    x = drawn(3, 50, device=DEVICE)[0]
    assert row_sums.fits(x)
    squares = torch.func.vmap(_algebra.square)(x)
    torch.testing.assert_close(squares, x.square().sum(1))


@pytest.mark.parametrize("name", ["row_sums", "left_over", "mixed"])
def test_compilers_are_told_the_truth(name):
    x, g, c = drawn(3, 20, torch.float32)
    args = {"row_sums": (x, g), "left_over": (x, g, c, c > 0.5), "mixed": (x, c, g, c[0])}[name]
    torch.library.opcheck(getattr(torch.ops.feddpc, name), args, test_utils=("test_schema", "test_faketensor"))


@GPU
@TYPES
@pytest.mark.parametrize(("m", "d"), [*SIZES, (10, 11_227_812)])
def test_the_kernels_compute_what_stands_for_them(m, d, dtype):
    x, g, c = drawn(m, d, dtype)
    there = [t.cuda() for t in (x, g, c)]
    assert row_sums.fits(there[0])
    for a, b in zip(row_sums.row_sums(*there[:2]), row_sums.row_sums(x, g), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-11, atol=1e-8)
    near = torch.arange(m) % 2 == 0
    left, expected = row_sums.left_over(*there, near.cuda()), row_sums.left_over(x, g, c, near)
    torch.testing.assert_close(left.cpu(), expected, rtol=1e-12, atol=0)
    close = {"rtol": 1e-6 if dtype == torch.float32 else 1e-13, "atol": 1e-6 if dtype == torch.float32 else 1e-13}
    for more in ((), (g, c[0])):
        mixed = row_sums.mixed(there[0], there[2], *(t.cuda() for t in more))
        torch.testing.assert_close(mixed.cpu(), row_sums.mixed(x, c, *more), **close)
    assert torch.equal(row_sums.row_sums(*there[:2])[0], row_sums.row_sums(*there[:2])[0])


@GPU
def test_rows_need_not_lie_together():
    x, g, c = drawn(4, 3000, device="cuda")
    apart = x.T.contiguous().T
    torch.testing.assert_close(row_sums.row_sums(apart, g)[0], x @ g)
    torch.testing.assert_close(row_sums.mixed(x[::2], c[::2]), c[::2] @ x[::2])
