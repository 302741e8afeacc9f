"""Row algebra against exact and float64 references, at sizes where float32 accumulation fails."""

import numpy as np
import pytest
import torch

from feddpc.methods import _algebra


@pytest.mark.parametrize(
    "d", [1, 7, _algebra.BLOCK - 1, _algebra.BLOCK, _algebra.BLOCK + 1, 3 * _algebra.BLOCK + 17, _algebra.LONG - 1]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_cover_everything_once(d, dtype):
    gen = torch.Generator().manual_seed(d)
    x, g = torch.randn(3, d, generator=gen, dtype=dtype), torch.randn(d, generator=gen, dtype=dtype)
    X, G = x.double(), g.double()
    torch.testing.assert_close(_algebra.row_dots(x, g), X @ G, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(_algebra.row_squares(x), (X * X).sum(1), rtol=1e-12, atol=0)
    look = _algebra.residuals(x, g)
    p = X @ G / (G @ G)
    torch.testing.assert_close(look.p_m, p, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(look.r2_m, ((X - p[:, None] * G) ** 2).sum(1), rtol=1e-9, atol=1e-25)
    c = torch.tensor([0.2, -1.0, 3.0], dtype=torch.float64)
    got = _algebra.residual_sum(c, p, x, g)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got.double(), c @ (X - p[:, None] * G), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("d", "digits"), [(_algebra.LONG - 1, 1e-14), (1_000_001, 4e-7), (11_227_812, 4e-7)])
def test_long_float32_rows_keep_their_digits(d, digits):
    """Where float32 sums lose the tail altogether: one large number, then many small ones of one sign."""
    x = torch.full((2, d), 1e-2)
    x[0, 0] = 1e3
    g = torch.ones(d)
    small, large = float(np.float32(1e-2)), 1e3
    dots, squares = _algebra.row_dots(x, g), _algebra.row_squares(x)
    np.testing.assert_allclose(dots, [large + (d - 1) * small, d * small], rtol=digits)
    np.testing.assert_allclose(squares, [large**2 + (d - 1) * small**2, d * small**2], rtol=digits)


@pytest.mark.parametrize("sin", [1.0, 0.7, 0.3, 1e-2, 1e-4])
def test_long_residuals_are_good_at_every_angle(sin):
    d = 2 * _algebra.LONG + 12_345
    gen = torch.Generator().manual_seed(0)
    g, e = torch.randn(2, d, generator=gen)
    x = torch.stack([sin * e + (1 - sin**2) ** 0.5 * g, e])
    X, G = x.double(), g.double()
    p = X @ G / (G @ G)
    r = X - p[:, None] * G
    look = _algebra.residuals(x, g)
    np.testing.assert_allclose(look.r2_m, (r * r).sum(1), rtol=2e-7)
    np.testing.assert_allclose(look.p_m, p, atol=1e-8)
    total = _algebra.residual_sum(torch.tensor([0.5, 0.5]).double(), look.p_m, x, g)
    if not look.clean:
        _algebra.project_out_(total, g, look.g2)
    cosine = float(total.double() @ G / (total.double().norm() * G.norm()))
    assert abs(cosine) < 1e-7
    assert look.clean == (sin > 0.71)


@pytest.mark.parametrize("sin", [1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_residual_norm_of_nearly_parallel_vectors(sin):
    """The closed form alone would be off by 1e-13 / sin^2; the sweep keeps the length good at every angle."""
    d = 200_000
    gen = torch.Generator().manual_seed(0)
    g = torch.randn(d, generator=gen, dtype=torch.float64)
    g /= g.norm()
    e = _algebra.project_out_(torch.randn(d, generator=gen, dtype=torch.float64), g)
    e = _algebra.project_out_(e / e.norm(), g)
    x = float(np.sqrt(1 - sin**2)) * g + sin * e
    for sweep in (None, True):
        got = float(_algebra.residuals(x[None], g, look=not sweep if sweep is not None else None).r2_m.sqrt())
        assert got == pytest.approx(sin, rel=1e-8)


def test_the_sweep_only_replaces_narrow_rows():
    x = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    g = x[0] + 1e-9 * x[1]
    a, b = _algebra.residuals(x, g, look=False), _algebra.residuals(x, g)
    torch.testing.assert_close(a.r2_m, b.r2_m, rtol=1e-6, atol=0)
    assert 0 < float(a.r2_m[0]) < 1e-15


def test_zero_vectors():
    x, zero = torch.ones(2, 3), torch.zeros(3)
    look = _algebra.residuals(x, zero)
    assert look.p_m.tolist() == [0, 0]
    assert look.r2_m.tolist() == [3, 3]
    assert look.cosine_m.tolist() == [0, 0]
    assert _algebra.project_out_(x[0].clone(), zero).tolist() == [1, 1, 1]
    assert _algebra.residuals(torch.zeros(1, 3), x[0]).cosine_m.tolist() == [0]


def test_extreme_scales_do_not_overflow():
    for scale in (1e-30, 1e30):
        x = torch.tensor([[3.0, 4.0]]) * scale
        look = _algebra.residuals(x, torch.tensor([scale, 0.0]))
        assert float(look.r2_m.sqrt()) == pytest.approx(4 * scale, rel=1e-6)
        assert float(look.cosine_m) == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize(("x_scale", "g_scale"), [(1e-20, 1.0), (1.0, 1e-20), (1e20, 1.0), (1.0, 1e20), (1e-30, 1e30)])
def test_long_rows_at_extreme_scales(x_scale, g_scale):
    """Their squares neither vanish nor overflow, as they would in float32."""
    gen = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, _algebra.LONG + 3, generator=gen), torch.randn(_algebra.LONG + 3, generator=gen)
    plain, scaled = _algebra.residuals(x, g), _algebra.residuals(x * x_scale, g * g_scale)
    torch.testing.assert_close(scaled.x2_m.sqrt() / x_scale, plain.x2_m.sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.r2_m.sqrt() / x_scale, plain.r2_m.sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.cosine_m, plain.cosine_m, rtol=1e-4, atol=1e-8)


def test_long_zero_rows():
    x, g = torch.zeros(2, _algebra.LONG), torch.zeros(_algebra.LONG)
    x[0, 5] = 2.0
    look = _algebra.residuals(x, g)
    assert look.p_m.tolist() == [0, 0]
    assert look.r2_m.tolist() == [4, 0]


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("x_scale", "g_scale"), [(1e10, 1e-38), (1e38, 1e-20), (1.0, 1e-44)])
def test_a_sum_of_residuals_much_longer_than_g(x_scale, g_scale, into):
    """``p = <x, g> / <g, g>`` is more than float32 can hold, but ``p g`` is not."""
    gen = torch.Generator().manual_seed(3)
    x, g = torch.randn(4, 50, generator=gen).clamp(-1, 1) * x_scale, torch.randn(50, generator=gen) * g_scale
    look, c = _algebra.residuals(x, g), torch.full((4,), 0.25, dtype=torch.float64)
    assert float(look.p_m.abs().max()) > 3e38
    total = _algebra.residual_sum(c, look.p_m, x, g, into=torch.zeros(50) if into else None)
    exact = c @ (x.double() - look.p_m[:, None] * g.double())
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=1e-6 * x_scale)
    left = x[0].double() - look.p_m[0] * g.double()
    torch.testing.assert_close(_algebra.project_out_(x[0].clone(), g).double(), left, rtol=0, atol=1e-6 * x_scale)
