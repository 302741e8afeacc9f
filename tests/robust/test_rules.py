"""Robust rules: closed forms, breakdown points, invariances, and what they promise about rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.errors import BadInputError
from feddpc.methods import Cohort
from feddpc.robust import rules
from feddpc.robust.rules import clipped, coordinate_median, krum_scores, spatial_median, trimmed
from feddpc.round.server_step import stacked

F64 = torch.float64
NAMES = [name for name in rules.names() if name != "mean"]
REPLACING = ["median", "trimmed_mean", "centered_clipping", "geometric_median"]
SELECTING = ["krum", "multi_krum"]
#: Rules whose centre turns with the rows; the other two look at coordinates.
ROUND = ["krum", "multi_krum", "geometric_median"]


def cloud(m=9, d=6, seed=0):
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def centre(name, x, **options):
    return rules.make(name, **options)({"delta": x}).up["delta"].mean(0)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_the_mean_is_no_rule():
    assert rules.make("mean") is None
    assert rules.names()[0] == "mean"


def test_hand_examples():
    x = torch.tensor([[1.0, 9.0], [2.0, 7.0], [4.0, 8.0], [100.0, -50.0]], dtype=F64)
    close(centre("median", x), torch.tensor([3.0, 7.5], dtype=F64))
    close(centre("trimmed_mean", x, share=0.25), torch.tensor([3.0, 7.5], dtype=F64))
    close(centre("median", x[:3]), torch.tensor([2.0, 8.0], dtype=F64))
    line = torch.tensor([[0.0], [1.0], [2.0], [4.0], [50.0]], dtype=F64)
    close(centre("trimmed_mean", line, share=0.2), torch.tensor([7 / 3], dtype=F64))


def test_krum_by_hand():
    """Five points on a line, one thought hostile: each is scored by its 5 - 1 - 2 = 2 nearest others."""
    x = torch.tensor([0.0, 1.0, 2.0, 5.0, 90.0], dtype=F64)
    squares = (x[:, None] - x).square()
    assert krum_scores(squares, 1).tolist() == [1 + 4, 1 + 1, 1 + 4, 9 + 16, 85**2 + 88**2]
    judged = rules.make("krum", share=0.2)({"delta": x[:, None]})
    assert judged.kept.tolist() == [False, True, False, False, False]
    assert judged.up["delta"].tolist() == [[1.0]]
    several = rules.make("multi_krum", share=0.2, select=3)({"delta": x[:, None]})
    assert several.kept.tolist() == [True, True, True, False, False]
    assert int(rules.make("multi_krum", share=0.2)({"delta": x[:, None]}).kept.sum()) == 5 - 1 - 2


def test_geometric_median_of_a_triangle():
    """Fermat's point of an equilateral triangle is its middle; of one with an angle above 120 degrees, that corner."""
    corners = torch.tensor([[0.0, 1.0], [math.sqrt(3) / 2, -0.5], [-math.sqrt(3) / 2, -0.5]], dtype=F64)
    close(spatial_median(corners + 5, 1e-12, 1000)[0], torch.tensor([5.0, 5.0], dtype=F64))
    flat = torch.tensor([[-10.0, 0.0], [0.0, 1.0], [10.0, 0.0]], dtype=F64)
    close(spatial_median(flat, 1e-12, 10_000)[0], flat[1], 1e-4)


def test_geometric_median_of_a_line_is_its_median():
    x = torch.tensor([[0.0], [1.0], [3.0], [70.0], [900.0]], dtype=F64)
    close(spatial_median(x, 1e-12, 10_000)[0], x[2], 1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_no_point_nearby_has_a_smaller_sum_of_distances(seed):
    x = cloud(7, 4, seed)
    best, _ = spatial_median(x, 1e-10, 1000)
    total = (x - best).norm(dim=1).sum()
    for step in torch.eye(4, dtype=F64) * 1e-3:
        assert float((x - best - step).norm(dim=1).sum()) > float(total)
        assert float((x - best + step).norm(dim=1).sum()) > float(total)


def test_geometric_median_keeps_to_its_tolerance():
    x = cloud(11, 30)
    usual = (x - spatial_median(x, 1e-14, 10_000)[0]).norm(dim=1).median()
    for tolerance in (1e-2, 1e-5, 1e-8):
        off = (spatial_median(x, tolerance, 10_000)[0] - spatial_median(x, 1e-14, 10_000)[0]).norm()
        assert float(off) < 20 * tolerance * float(usual)


def test_centered_clipping_by_hand():
    """From the median 1, radius 2, one iteration: 0, 1, 2 stay and 101 becomes 1 + 2."""
    x = torch.tensor([[0.0], [1.0], [1.0], [2.0], [101.0]], dtype=F64)
    close(clipped(x, 2.0, 1), torch.tensor([[0.0], [1.0], [1.0], [2.0], [3.0]], dtype=F64))
    close(clipped(x, 2.0, 2), torch.tensor([[0.0], [1.0], [1.0], [2.0], [7 / 5 + 2]], dtype=F64))


def test_limits_where_a_rule_is_the_mean():
    x = cloud()
    close(centre("centered_clipping", x, radius=1e6), x.mean(0))
    close(centre("trimmed_mean", x, share=0.0), x.mean(0))
    close(centre("multi_krum", x, select=len(x)), x.mean(0))
    close(clipped(x, 1e6, 1), x, 1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_one_row_and_equal_rows_stay(name):
    x = cloud(1)
    assert torch.equal(rules.make(name)({"delta": x}).up["delta"], x)
    same = x.expand(6, -1)
    close(centre(name, same), x[0], 1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_breakdown(name, size):
    """Four hostile of eleven, together and as far as they like: the centre stays within the honest rows' reach."""
    honest = cloud(7, 5)
    middle = honest.mean(0)
    reach = (honest - middle).norm(dim=1).max()
    hostile = torch.full((4, 5), size, dtype=F64)
    got = centre(
        name, torch.cat([honest, hostile]), **({"share": 0.37} if name in ("trimmed_mean", *SELECTING) else {})
    )
    assert float((got - middle).norm()) < 3 * float(reach)
    assert float((torch.cat([honest, hostile]).mean(0) - middle).norm()) > 50 * float(reach)


def test_the_breakdown_point_of_the_medians_is_a_half():
    """A majority may put the centre where it likes, a minority may not."""
    good, bad = torch.zeros(1, 3, dtype=F64), torch.full((1, 3), 1e6, dtype=F64)
    for name in ("median", "geometric_median", "centered_clipping"):
        assert float(centre(name, torch.cat([good] * 5 + [bad] * 4)).abs().max()) < 1
        assert float(centre(name, torch.cat([good] * 4 + [bad] * 5)).abs().max()) > 9e5


@pytest.mark.parametrize("name", NAMES)
def test_permutations(name):
    """Rows in another order give the same rows in that order, and so the same centre."""
    x = cloud()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    one, other = (rules.make(name)({"delta": rows}) for rows in (x, x[order]))
    assert other.kept.tolist() == one.kept[order].tolist()
    close(other.up["delta"].mean(0), one.up["delta"].mean(0))
    if name in REPLACING:
        close(other.up["delta"], one.up["delta"][order])


@pytest.mark.parametrize("name", ROUND)
def test_rotations(name):
    x = cloud()
    turn = torch.linalg.qr(cloud(6, 6, seed=4))[0]
    close(centre(name, x @ turn.T), turn @ centre(name, x), 1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [-3.0, 1e-20, 1e20])
def test_shifts_and_multiples(name, factor):
    x, shift = cloud(), cloud(1, seed=8)[0]
    close(centre(name, factor * x) / factor, centre(name, x), 1e-7)
    close(centre(name, x + shift), centre(name, x) + shift, 1e-7)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([torch.float32, F64]))
@settings(max_examples=60, deadline=None)
def test_rows_stay_near_their_centre(m, d, seed, dtype):
    """What a method remembers of a client is never farther from the centre than the bulk of what came."""
    x = cloud(m, d, seed).to(dtype)
    x[: m // 3] *= 1e12
    for name in REPLACING:
        rows = rules.make(name, **({"share": 0.4} if name == "trimmed_mean" else {}))({"delta": x}).up["delta"]
        assert rows.dtype == dtype
        assert bool(rows.isfinite().all())
        middle = rows.mean(0)
        calm = x[m // 3 :]
        reach = 4 * math.sqrt(d) * float(1 + calm.norm(dim=1).max())
        assert float((rows - middle).norm(dim=1).max()) <= reach
        assert float(middle.norm()) <= reach


def test_trimmed_rows_keep_what_was_not_trimmed():
    x = cloud()
    rows = trimmed(x, 2)
    close(rows.mean(0), x.sort(0).values[2:-2].mean(0))
    assert int((rows == x).sum()) == (9 - 4) * 6
    close(coordinate_median(x), x.median(0).values)


def test_long_rows_are_trimmed_block_by_block():
    x = cloud(5, 70_000)
    close(trimmed(x, 1).mean(0), x.sort(0).values[1:-1].mean(0))


def test_several_vectors_a_client_are_judged_together_by_selection():
    """The two far ones differ: one in what is long, one in what is short; both are seen."""
    delta, change = cloud(9, 4) * 1e-3, cloud(9, 4, seed=1) * 1e3
    delta[0] += 1.0
    change[1] += 1e6
    kept = rules.make("multi_krum", share=0.3)({"delta": delta, "change": change}).kept
    assert kept.tolist()[:2] == [False, False]
    assert int(kept.sum()) == 9 - 2 - 2


def test_flags_beside_vectors_are_judged_as_well():
    """FedDPC's client form sends a number too; a lie about it must not get through."""
    up = {"delta": cloud(), "guarded": torch.tensor([0.0] * 8 + [-1e9])}
    judged = rules.make("median")(up)
    assert judged.up["guarded"].shape == (9,)
    assert judged.up["guarded"].tolist() == [0.0] * 9


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("medain", {}, "did you mean 'median'"),
        ("median", {"share": 0.2}, "has no options"),
        ("krum", {"shere": 0.2}, "did you mean 'share'"),
        ("krum", {"share": 0.5}, "below 0.5"),
        ("trimmed_mean", {"share": -0.1}, "probability"),
        ("multi_krum", {"select": -1}, "at least 0"),
        ("centered_clipping", {"radius": -1.0}, "above 0"),
        ("geometric_median", {"iterations": 0}, "at least 1"),
    ],
)
def test_bad_options_say_what_to_do(name, options, words):
    with pytest.raises(BadInputError, match=words):
        rules.make(name, **options)


def geometric_centre(x):
    """The mean of the rows that the rule hands to a method, with its own tolerance and patience."""
    return rules.make("geometric_median")({"delta": x}).up["delta"].mean(0)


def test_the_rows_of_the_geometric_median_have_it_as_their_mean():
    flat = torch.tensor([[-10.0, 0.0], [0.0, 1.0], [10.0, 0.0]], dtype=F64)  # an angle above 120 degrees: that corner
    close(geometric_centre(flat), flat[1])
    angle = math.radians(121) / 2
    wide = torch.tensor(
        [[math.sin(angle), math.cos(angle)], [0.0, 0.0], [-math.sin(angle), math.cos(angle)]], dtype=F64
    )
    close(geometric_centre(wide), wide[1])
    line = torch.tensor([[0.0], [1.0], [3.0], [70.0], [900.0]], dtype=F64)
    close(geometric_centre(line), line[2])
    for seed in (*range(20), 136, 231, 281, 288):
        x = cloud(3 + seed % 9, 1 + seed % 5, seed)
        best, _ = spatial_median(x, 1e-9, 100_000)
        usual = float((x - best).norm(dim=1).median())
        assert float((geometric_centre(x) - best).norm()) < 0.01 * usual  # rows near a line are the slowest


def test_a_share_is_counted_as_people_count():
    x = torch.arange(100.0, dtype=F64)[:, None]
    rows = rules.make("trimmed_mean", share=0.29)({"delta": x}).up["delta"]
    assert int((rows != x).sum()) == 2 * 29


def test_feddpc_reports_under_a_rule_what_it_reports_without():
    g = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    x = torch.cat([cloud(5, 3), g.expand(4, 3)])  # four are parallel to g, and guarded
    method = methods.create("feddpc")
    cohort = Cohort(2, torch.arange(9), 9, torch.full((9,), 1 / 9, dtype=F64), torch.ones(9), 1.0, 1.0)
    plain = method.aggregate(torch.zeros(3, dtype=F64), {"delta": g}, {"delta": x}, cohort).notes
    rows, notes = method.transform({"delta": g}, {"delta": x}, cohort)
    assert rows.keys() == {"delta"}
    assert {k: float(v) for k, v in notes.items()} == pytest.approx({k: float(v) for k, v in plain.items()})
    assert float(notes["guarded"]) == 4
    with pytest.raises(BadInputError, match="guard"):
        methods.create("feddpc", guard="exclude").combine(g, {"delta": g}, {"delta": x}, cohort)


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hostile", [1, 2, 3, 7])
def test_finite_rows_near_the_largest_number_stay_finite(name, hostile):
    """Neither Inf nor NaN comes of finite rows, in what rules return and in their mean."""
    x = cloud(7, 5).float()
    x[:hostile] = LARGEST * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    x[: hostile // 2] *= -1
    rows = rules.make(name)({"delta": x}).up["delta"]
    assert rows.isfinite().all()
    assert (rows / len(rows)).sum(0).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reach", [1.0, 0.3])
def test_feddpc_under_a_rule_survives_a_client_near_the_largest_number(name, reach):
    """Its residual times 1 + |D| / |r| is more than float32 can hold; it must not become Inf after the screening."""
    method = methods.create("feddpc")
    x, g = cloud(7, 5).float(), cloud(1, 5, seed=1).float()[0]
    x[2] = LARGEST * reach * torch.tensor([1.0, 0.9, 1.0, 1.0, 0.9])
    cohort = Cohort(2, torch.arange(7), 7, torch.full((7,), 1 / 7, dtype=F64), torch.ones(7, dtype=F64), 1.0, 1.0)
    rows, notes = method.transform({"delta": g}, {"delta": x}, cohort)
    rows = {"delta": stacked(rows["delta"])}
    assert rows["delta"].isfinite().all()
    assert math.isfinite(float(notes["mean_scale"]))
    kept, chosen = rules.make(name)(rows)
    chosen_weights = torch.full((int(kept.sum()),), 1 / int(kept.sum()), dtype=F64)
    smaller = Cohort(2, torch.arange(7)[kept], 7, chosen_weights, torch.ones(int(kept.sum()), dtype=F64), 1.0, 1.0)
    step = method.combine(torch.zeros(5), {"delta": g}, chosen, smaller)
    assert step.update.isfinite().all()
    assert float(step.update.norm()) < 100
