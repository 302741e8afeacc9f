"""Participation: who is invited, how often, and that a draw depends on seed and round alone."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import sampling
from feddpc.errors import BadInputError
from feddpc.sampling import make

SIZES = np.arange(1, 21)


def one(name, population=20, cohort=5, seed=0, **more):
    return make(name, population=population, cohort=cohort, seed=seed, sizes=np.arange(1, population + 1), **more)


def frequencies(s, rounds):
    seen = np.concatenate([s.draw(t).invited for t in range(1, rounds + 1)])
    return np.bincount(seen, minlength=s.pool.population) / rounds


@pytest.mark.parametrize("name", sampling.names())
@given(
    population=st.integers(1, 60),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    rounds=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    dropout=st.floats(0, 0.99),
)
@settings(max_examples=40, deadline=None)
def test_a_draw_is_a_function_of_seed_and_round(name, population, share, seed, rounds, dropout):
    cohort = 1 + int(share * (population - 1))
    options = {"groups": max(1, population // cohort // 2)} if name == "cyclic" else {}
    first, second = (one(name, population, cohort, seed, dropout=dropout, **options) for _ in range(2))
    in_order = {t: second.draw(t) for t in range(1, 31)}
    full = one(name, population, cohort, seed, **options)
    for t in rounds:
        draw = first.draw(t)
        assert np.array_equal(draw.invited, in_order[t].invited)
        assert np.array_equal(draw.answered, in_order[t].answered)
        assert np.array_equal(draw.invited, full.draw(t).answered)  # dropout does not change who is invited
        assert draw.invited.dtype == np.int64
        assert len(draw.invited) >= (name != "poisson")
        assert (np.diff(draw.invited) > 0).all()
        assert np.isin(draw.invited, np.arange(population)).all()
        assert np.array_equal(np.union1d(draw.answered, draw.dropped), draw.invited)
        assert len(np.intersect1d(draw.answered, draw.dropped)) == 0
        if name in ("uniform", "cyclic", "weighted"):
            assert len(draw.invited) == cohort
        if name == "markov":
            assert len(draw.invited) <= cohort


def test_uniform_invites_everybody_equally_often_and_pairs_too():
    s = one("uniform")
    draws = [s.draw(t).invited for t in range(1, 4001)]
    together = np.zeros((20, 20))
    for ids in draws:
        together[np.ix_(ids, ids)] += 1 / 4000
    assert np.abs(np.diag(together) - 5 / 20).max() < 0.04
    pairs = together[~np.eye(20, dtype=bool)]
    assert np.abs(pairs - 5 * 4 / (20 * 19)).max() < 0.03


@pytest.mark.parametrize("name", ["uniform", "bernoulli", "poisson", "cyclic"])
def test_a_small_cohort_of_a_million_costs_little_memory(name):
    s = make(name, population=1_000_000, cohort=100, seed=0)
    s.draw(1)
    tracemalloc.start()
    s.draw(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_bernoulli_sizes_are_binomial():
    s = one("bernoulli", population=100, cohort=10)
    counts = np.array([len(s.draw(t).invited) for t in range(1, 3001)])
    assert abs(counts.mean() - 10) < 0.3
    assert abs(counts.var() - 9) < 1.0
    assert np.abs(frequencies(s, 3000) - 0.1).max() < 0.03
    assert min(len(one("bernoulli", population=50, cohort=1).draw(t).invited) for t in range(1, 200)) == 1


def test_cyclic_invites_only_the_group_whose_turn_it_is():
    s = one("cyclic", population=22, cohort=5, groups=4)
    for t in range(1, 40):
        assert (s.draw(t).invited % 4 == (t - 1) % 4).all()
    assert frequencies(s, 400).min() > 0


def test_cyclic_says_what_would_work():
    with pytest.raises(BadInputError, match=r"groups = 5 leaves 4 .*at most 4 groups, or a cohort of at most 4"):
        one("cyclic", groups=5)
    one("cyclic", groups=4)
    with pytest.raises(BadInputError, match=r"at most 4 groups$"):
        one("cyclic", groups=21)


@pytest.mark.parametrize(("leave", "back"), [(0.1, 0.1), (0.05, 0.45), (0.6, 0.2)])
def test_markov_is_stationary_and_persistent(leave, back):
    population = 4000
    s = make("markov", population=population, cohort=population, seed=1, leave=leave, back=back)  # invites all present
    here = np.zeros((12, population), bool)
    for t in range(12):
        here[t, s.draw(t + 1).invited] = True
    assert np.abs(here.mean(1) - back / (leave + back)).max() < 0.04
    stayed, returned = here[1:][here[:-1]].mean(), here[1:][~here[:-1]].mean()
    assert abs(stayed - (1 - leave)) < 0.02
    assert abs(returned - back) < 0.02


def test_markov_without_leaving_is_uniform_and_never_empty_when_all_leave():
    always = one("markov", leave=0.0)
    assert all(len(always.draw(t).invited) == 5 for t in range(1, 30))
    rare = one("markov", population=3, cohort=1, leave=1.0, back=1e-9)
    assert all(len(rare.draw(t).invited) == 1 for t in range(1, 30))
    assert np.array_equal(
        rare.draw(7).invited, one("markov", population=3, cohort=1, leave=1.0, back=1e-9).draw(7).invited
    )


def test_weighted_of_one_is_proportional_to_size():
    s = make("weighted", population=20, cohort=1, seed=0, sizes=SIZES)
    assert np.abs(frequencies(s, 6000) - SIZES / SIZES.sum()).max() < 0.015


def test_weighted_of_two_without_replacement_matches_the_exact_law():
    w = np.array([1.0, 2.0, 5.0])
    p = w / w.sum()
    exact = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    s = make("weighted", population=3, cohort=2, seed=0, weights=w)
    assert np.abs(frequencies(s, 6000) - exact).max() < 0.02


def test_weighted_passes_over_weightless_clients_and_names_what_is_missing():
    s = make("weighted", population=4, cohort=2, seed=0, weights=[0, 1, 0, 1e-300])
    assert s.draw(1).invited.tolist() == [1, 3]
    for weights, message in [
        (None, "nothing to weigh by"),
        ([1, 2], "4 finite numbers"),
        ([1, 2, 3, -1], "at least 0"),
        ([1, 2, 3, float("nan")], "finite"),
        ([1, 0, 0, 0], "only 1 are above 0"),
    ]:
        with pytest.raises(BadInputError, match=message):
            make("weighted", population=4, cohort=2, seed=0, weights=weights)


def test_dropout_is_independent_with_its_rate():
    s = one("uniform", population=100, cohort=50, dropout=0.3)
    draws = [s.draw(t) for t in range(1, 401)]
    lost = np.array([len(d.dropped) for d in draws])
    assert abs(lost.mean() - 15) < 0.5
    assert abs(lost.var() - 10.5) < 2.5
    assert any(len(one("uniform", cohort=1, dropout=0.9).draw(t).answered) == 0 for t in range(1, 20))


def test_fixed_follows_its_schedule_and_ends_with_it():
    s = one("fixed", schedule=[[3, 1], [0]])
    assert s.draw(2).invited.tolist() == [0]
    assert s.draw(1).invited.tolist() == [1, 3]
    with pytest.raises(BadInputError, match="round 3 is past the schedule's 2 rounds"):
        s.draw(3)
    for bad in ([[]], [[1, 1]], [[20]], [[-1]]):
        with pytest.raises(BadInputError, match="schedule of round 1"):
            one("fixed", schedule=bad)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("unifrom", {}, "did you mean 'uniform'"),
        ("uniform", {"groups": 2}, "has no options"),
        ("cyclic", {"group": 2}, "did you mean 'groups'"),
        ("cyclic", {"groups": 0}, "groups = 0"),
        ("markov", {"leave": 1.5}, "leave = 1.5"),
        ("markov", {"back": 0}, "back = 0"),
        ("uniform", {"cohort": 21}, "at most 20"),
        ("uniform", {"cohort": 0}, "cohort = 0"),
        ("uniform", {"population": 0}, "population = 0"),
        ("uniform", {"dropout": 1.0}, "dropout = 1.0"),
        ("uniform", {"dropout": -0.1}, "dropout = -0.1"),
        ("uniform", {"dropout": float("nan")}, "dropout = nan"),
    ],
)
def test_bad_requests_are_named(name, change, message):
    with pytest.raises(BadInputError, match=message):
        make(name, **({"population": 20, "cohort": 5, "seed": 0} | change))


def test_rounds_count_from_one_and_options_are_listed():
    with pytest.raises(BadInputError, match="round = 0"):
        one("uniform").draw(0)
    assert {n: sampling.options(n) for n in sampling.names()} == {
        "uniform": {},
        "bernoulli": {},
        "poisson": {},
        "cyclic": {"groups": 4},
        "markov": {"leave": 0.1, "back": 0.1},
        "weighted": {"weights": None},
    }
