"""Choosing, on outcomes made by hand."""

import pytest

from feddpc.errors import BadInputError
from feddpc.report.table import sweep_table
from feddpc.study import choose
from feddpc.study.sweep import choose_both
from sweeping import outcome


def settings(outcomes, **how):
    return {c.method: c.settings for c in choose(outcomes, **how)}


def test_each_criterion_has_its_own_winner_and_its_own_worth():
    outcomes = [
        outcome(lr=0.1, test=0.60, valid=0.70, at=0.55),
        outcome(lr=0.2, test=0.65, valid=0.60, at=0.50),
    ]
    by_validation, by_test = choose_both(outcomes)
    assert (by_validation.by, by_validation.settings, by_validation.score) == ("validation", {"lr": 0.1}, 0.70)
    assert (by_validation.test, by_validation.round) == (0.55, 8)
    assert (by_test.by, by_test.settings, by_test.score) == ("test", {"lr": 0.2}, 0.65)
    assert (by_test.test, by_test.round, by_test.validation) == (0.65, 10, 0.60)


def test_the_mean_over_seeds_decides():
    lucky = [outcome(lr=0.1, seed=s, valid=v, at=a) for s, v, a in ((0, 0.9, 0.8), (1, 0.1, 0.2))]
    steady = [outcome(lr=0.2, seed=s, valid=0.6, at=a) for s, a in ((0, 0.5), (1, 0.7))]
    (choice,) = choose(lucky + steady)
    assert (choice.settings, choice.score, choice.seeds) == ({"lr": 0.2}, 0.6, 2)
    assert choice.test == pytest.approx(0.6)
    assert choice.test_spread == pytest.approx(0.02**0.5)
    assert choice.results == steady


@pytest.mark.parametrize("status", ["diverged", "failed", "missing"])
def test_a_setting_counts_only_if_every_seed_ended_well(status):
    outcomes = [
        outcome(lr=0.1, seed=0, valid=0.9, test=0.9),
        outcome(lr=0.1, seed=1, valid=0.9, test=0.9, status=status),
        outcome(lr=0.2, seed=0, valid=0.3),
        outcome(lr=0.2, seed=1, valid=0.3),
    ]
    for by in ("validation", "test"):
        (choice,) = choose(outcomes, by)
        assert choice.settings == {"lr": 0.2}
        assert (choice.tried, getattr(choice, status), choice.count) == (1, 1, 2)


def test_a_seed_that_nobody_asked_for_is_missing():
    outcomes = [outcome(lr=0.1, seed=0, valid=0.9), *(outcome(lr=0.2, seed=s, valid=0.3) for s in (0, 1))]
    (choice,) = choose(outcomes)
    assert (choice.settings, choice.missing) == ({"lr": 0.2}, 1)


def test_where_nothing_ended_nothing_is_chosen():
    (choice,) = choose([outcome(status="diverged"), outcome(lr=0.2, status="missing")])
    assert (choice.settings, choice.score, choice.test, choice.round) == (None, None, None, None)
    assert (choice.tried, choice.diverged, choice.missing) == (0, 1, 1)
    assert choose([]) == []


def test_without_validation_data_only_the_test_set_chooses():
    outcomes = [outcome(valid=None, at=None), outcome(lr=0.2, valid=None, at=None, test=0.7)]
    assert [c.by for c in choose_both(outcomes)] == ["test"]
    assert choose(outcomes)[0].settings is None


def test_every_method_has_a_winner_and_shows_what_varied():
    outcomes = [
        *(outcome("feddpc", lr, valid=lr + lam, hyper={"lam": lam, "tau": 0.0}) for lr in (0.1, 0.2) for lam in (0, 1)),
        *(outcome("fedavg", lr, valid=1 - lr) for lr in (0.1, 0.2)),
    ]
    assert settings(outcomes) == {"feddpc": {"lr": 0.2, "lam": 1}, "fedavg": {"lr": 0.1}}
    assert [(c.method, c.count, c.rounds) for c in choose(outcomes)] == [("feddpc", 4, 20), ("fedavg", 2, 20)]


def test_what_is_not_tuned_is_another_problem():
    outcomes = [outcome(lr=lr, alpha=alpha, valid=lr * alpha) for lr in (0.1, 0.3) for alpha in (0.2, 0.6)]
    found = choose(outcomes)
    assert [(c.problem, c.settings, c.count) for c in found] == [
        ({"alpha": 0.2}, {"lr": 0.3}, 2),
        ({"alpha": 0.6}, {"lr": 0.3}, 2),
    ]


def test_over_says_what_is_tuned():
    outcomes = [
        outcome("feddpc", lr, hyper={"lam": lam}, valid=abs(lr - lam)) for lr in (0.1, 0.9) for lam in (0.2, 0.8)
    ]
    for over in (("lr",), ["lr"]):
        found = {c.problem["hyper.lam"]: c.settings for c in choose(outcomes, over=over)}
        assert found == {0.2: {"lr": 0.9}, 0.8: {"lr": 0.1}}
    for name in ("lam", "hyper.lam", "feddpc.lam"):
        (choice,) = choose(outcomes, over=("lr", name))
        assert choice.count == 4
    with pytest.raises(BadInputError, match="mu is no key"):
        choose(outcomes, over=("lr", "mu"))
    with pytest.raises(BadInputError, match="unknown way to choose 'luck'"):
        choose(outcomes, by="luck")


def test_how_a_run_was_made_and_filled_in_rates_do_not_part_settings():
    outcomes = [outcome(engine="loop", seed=0), outcome(engine="stacked", server_lr=0.1, seed=1)]
    (choice,) = choose(outcomes)
    assert (choice.count, choice.seeds, choice.settings) == (1, 2, {})
    (choice,) = choose([outcome(server_lr=0.5, valid=0.9), outcome()])
    assert choice.settings == {"server_lr": 0.5}


def test_the_first_of_equals_wins():
    assert settings([outcome(lr=0.3), outcome(lr=0.1)]) == {"fedavg": {"lr": 0.3}}


def test_ones_own_parts_are_called_by_their_names():
    results = [outcome("work/mine.py:Mine", model=f"work/nets.py:{net}") for net in ("Small", "Large")]
    rows = sweep_table(choose(results), "validation").rows
    assert [row[0] for row in rows] == ["Mine model=Small", "Mine model=Large"]
    assert {c.method for c in choose(results)} == {"work/mine.py:Mine"}  # chosen.json can be followed
