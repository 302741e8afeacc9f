"""The ladder: who climbs, what is continued instead of run again, and where it looks beyond the grid."""

import dataclasses

import numpy as np
import pytest

from feddpc.errors import BadInputError
from feddpc.runs.stop import Stop
from feddpc.study import InProcess, RunSpec, StudyPlan, run_study, run_sweep
from feddpc.study.folder import StudyFolder
from feddpc.study.ladder import AROUND, Trial, beyond, climb, next_to, rungs, winner
from feddpc.study.space import Space, equal_budgets
from feddpc.study.sweep import choose_both, climb_plan, gather
from sweeping import Made, config, ladder_plan, numbers, records

ROUNDS, SEEDS = 400, (0, 1)


def make(group, values):
    return Trial(group, values, config(lr=values["lr"], model_options={"hidden": [4]}), f"{group} {values}")


def let_climb(rates, run, **more):
    trials = [make("fedavg", {"lr": lr}) for lr in rates]
    return climb(trials, ROUNDS, SEEDS, run, make, **more)


def test_the_better_half_runs_longer():
    """400 rounds: all 50, above chance 100, four 200, two 400 over both seeds; the winner by the mean over seeds."""
    rates = [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01]
    means = dict(zip(rates, (0.12, 0.40, 0.60, 0.70, 0.69, 0.50, 0.10), strict=True))
    run = Made(lambda lr, rounds, seed: means[lr] + (0.1 * seed if lr == 0.05 else 0))
    state = let_climb(rates, run)
    assert [len(asked) for asked in run.asked[:4]] == [7, 5, 4, 4]  # two at chance: below 1.5 tenths
    assert [sorted({r for _, r, _ in asked}) for asked in run.asked[:4]] == [[50], [100], [200], [400]]
    assert {(lr, seed) for lr, _, seed in run.asked[3]} == {(lr, seed) for lr in (0.1, 0.05) for seed in SEEDS}
    assert all(seed == 0 for asked in run.asked[:3] for _, _, seed in asked)
    assert {lr for lr, _, _ in run.asked[4]} == {0.02}  # the neighbour of the winner that had fallen off
    assert state.complete
    assert winner(state, "fedavg", "validation").values == {"lr": 0.05}  # seed 0 alone would choose 0.1
    assert [t.values["lr"] for t in state.at_chance] == [1.0, 0.01]
    assert len(state.results) == 7 + 3  # two seeds of three of them


def test_a_winner_at_an_end_has_its_neighbours_tried_until_it_is_inside():
    run = Made(lambda lr, rounds, seed: 0.9 - 0.1 * abs(np.log10(lr) - 1.0))  # best at rate 10
    state = let_climb([0.1, 0.01], run)
    assert {1.0, 10.0, 100.0} <= {t.values["lr"] for t in state.around}
    assert winner(state, "fedavg", "validation").values == {"lr": 10.0}
    assert all(r == ROUNDS for asked in run.asked[4:] for _, r, _ in asked)
    endless = Made(lambda lr, rounds, seed: 0.5 + 0.01 * np.log10(lr))
    assert let_climb([0.1, 0.01], endless).complete
    assert len(endless.asked) == 4 + AROUND


def test_rates_between_those_of_the_grid_are_tried_next_to_the_winner():
    """Best at 0.4, between 0.1 and 1: half-way, and then half-way again."""
    run = Made(lambda lr, rounds, seed: 0.9 - 0.3 * abs(np.log10(lr / 0.4)))
    state = let_climb([1.0, 0.1, 0.01, 0.001], run)
    assert abs(np.log10(winner(state, "fedavg", "validation").values["lr"] / 0.4)) < 0.15
    tried = sorted(t.values["lr"] for t in state.finalists)
    assert len(tried) == len(set(tried))


def test_neighbours_of_other_keys_are_those_of_the_grid_and_those_that_fell_off_run_to_the_end():
    """A setting that starts slowly and fell off is found again if it is next to the winner."""

    def two(group, values):
        return Trial(group, values, config(lr=values["lr"], method="fedprox", hyper={"mu": values["mu"]}), str(values))

    late = {(0.1, 1.0): 0.9, (0.1, 0.1): 0.8}
    grid = [{"lr": lr, "mu": mu} for lr in (0.1, 0.05) for mu in (10.0, 1.0, 0.1, 0.01)]

    class Slow(Made):
        def result(self, spec):
            key = (spec.config.lr, spec.config.hyper["mu"])
            full = late.get(key, 0.5 if key[0] == 0.1 else 0.4)
            value = 0.16 if key == (0.1, 1.0) and spec.config.rounds < ROUNDS else full
            self.score = lambda *_: value
            return super().result(spec)

    trials = [two("fedprox", values) for values in grid]
    state = climb(trials, ROUNDS, SEEDS, Slow(None), two)
    assert winner(state, "fedprox", "validation").values == {"lr": 0.1, "mu": 1.0}
    assert state.complete


def test_what_is_outside_its_domain_is_no_neighbour():
    def refuse(group, values):
        if values["lr"] > 0.1:
            raise BadInputError("lr")
        return make(group, values)

    run = Made(lambda lr, rounds, seed: 0.9)
    trials = [make("fedavg", {"lr": lr}) for lr in (0.1, 0.05, 0.01)]
    state = climb(trials, ROUNDS, SEEDS, run, refuse)
    assert state.complete
    assert max(t.values["lr"] for t in state.finalists) == 0.1


def test_what_diverged_or_failed_does_not_climb():
    run = Made(lambda lr, rounds, seed: 0.9, lambda c: {0.1: "diverged", 0.05: "failed"}.get(c.lr, "done"))
    state = let_climb([0.1, 0.05, 0.03, 0.02, 0.01], run)
    assert {lr for lr, _, _ in run.asked[1]} == {0.03, 0.02, 0.01}
    assert winner(state, "fedavg", "validation").values["lr"] in (0.03, 0.02, 0.01)


def test_a_group_that_has_not_begun_to_learn_keeps_four():
    run = Made(lambda lr, rounds, seed: 0.1 + lr / 100)
    state = let_climb([0.5, 0.4, 0.3, 0.2, 0.1], run)
    assert [len(asked) for asked in run.asked[:4]] == [5, 4, 4, 4]
    assert len(state.at_chance) == 5


def test_it_stops_where_runs_are_missing():
    run = Made(lambda lr, rounds, seed: 0.9, lambda c: "missing" if c.rounds == 100 else "done")
    state = let_climb([0.1, 0.05], run)
    assert not state.complete
    assert len(run.asked) == 2
    assert winner(state, "fedavg", "validation") is None


def test_runs_that_fall_off_are_named_once():
    gone = []
    let_climb(
        [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01], Made(lambda lr, *_: 0.9 - abs(lr - 0.1) / 10), dropped=gone.append
    )
    rates = [s.config.lr for s in gone if s.config.rounds < ROUNDS]
    assert len(set(rates)) == len(rates) == 5
    assert {s.config.seed for s in gone if s.config.rounds == ROUNDS} == set(SEEDS)


@pytest.mark.parametrize("rounds", [1, 2, 4, 7, 60, 400, 800])
def test_rungs_never_fall(rounds):
    steps = [rung.rounds for rung in rungs(rounds, SEEDS)]
    assert steps == sorted(steps)
    assert 1 <= steps[0] <= min(50, rounds)
    assert steps[-1] == rounds


def test_neighbours():
    assert next_to(["zero", "keep"], "zero", fill=False) == []
    assert next_to([0.0, 0.5, 0.8], 0.5, fill=False) == [[0.0], [0.8]]
    assert beyond([0.0, 0.5, 0.8], 0.8) == [1.28, 0.92]
    assert beyond([2.0], 2.0) == []
    assert beyond([1.0, 0.9, 0.25], 1.0) == [4.0]  # not 1.1
    assert beyond([1.0, 0.9], 0.9) == [0.81]


def test_every_method_gets_as_many_settings():
    grid = [{"lr": lr, "mu": mu} for lr in (1.0, 0.1) for mu in (1.0, 0.1, 0.01)]
    equal = equal_budgets({"fedprox": grid, "fedavg": [{"lr": 1.0}, {"lr": 0.1}], "own": [{"lam": 1.0}]})
    assert equal["fedprox"] == grid
    assert len(equal["fedavg"]) == 6
    assert equal["fedavg"][:2] == [{"lr": 1.0}, {"lr": 0.1}]
    assert all(0.1 <= values["lr"] <= 1 for values in equal["fedavg"])
    assert len({values["lr"] for values in equal["fedavg"]}) == 6
    assert equal["own"] == [{"lam": 1.0}]  # nothing to fill up with


# Runs that are continued.


def spec(rounds, **values):
    return RunSpec(config(rounds=rounds, method="feddpc", lr=0.1, **values), extendable=True)


def test_a_longer_run_continues_the_shorter_one(tmp_path):
    """One folder, whose rounds are those of a run that was never stopped; shorter questions are still answered."""
    whole = run_study([spec(6)], tmp_path / "whole")
    for rounds in (2, 5, 6):
        grown = run_study([spec(rounds)], tmp_path / "grown")
        assert grown[0].rounds == rounds
        assert (grown[0].status, grown[0].message) == ("done", "")
    assert records(tmp_path / "grown") == records(tmp_path / "whole")
    assert numbers(grown) == numbers(whole)
    before = (tmp_path / "grown" / "items" / spec(2).key / "rounds.jsonl").stat().st_mtime_ns
    short = run_study([spec(3)], tmp_path / "grown")[0]
    assert (short.status, short.rounds) == ("done", 3)
    assert numbers([short]) == numbers(run_study([spec(3)], tmp_path / "three"))
    assert (tmp_path / "grown" / "items" / spec(2).key / "rounds.jsonl").stat().st_mtime_ns == before


def test_an_extension_that_was_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("feddpc.study.runner.POLL_SECONDS", 0.0)
    run_study([spec(2)], tmp_path / "a")
    stop = Stop()
    (stopped,) = run_study(
        [spec(12)],
        tmp_path / "a",
        stop=stop,
        on_progress=lambda now: setattr(stop, "wanted", stop.wanted or now.rounds > 4),
    )
    assert stopped.status == "missing"
    assert 2 < stopped.rounds < 12
    assert numbers(run_study([spec(12)], tmp_path / "a")) == numbers(run_study([spec(12)], tmp_path / "b"))
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_without_its_checkpoint_a_run_begins_again(tmp_path):
    run_study([spec(2)], tmp_path)
    StudyFolder(tmp_path).drop_checkpoint(spec(2))
    assert not (tmp_path / "items" / spec(2).key / "checkpoint").exists()
    again = run_study([spec(4)], tmp_path)
    assert numbers(again) == numbers(run_study([spec(4)], tmp_path / "other"))


def test_an_interrupted_extension_is_missing_but_its_beginning_is_there(tmp_path):
    run_study([spec(2)], tmp_path)
    run_study([spec(8)], tmp_path / "long")
    path = tmp_path / "items" / spec(2).key
    lines = (tmp_path / "long" / "items" / spec(2).key / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (path / "rounds.jsonl").write_bytes(b"".join(lines[:5]))
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("rounds = 2", "rounds = 8"))
    folder = StudyFolder(tmp_path)
    assert [folder.read(spec(r)).status for r in (2, 5, 8)] == ["done", "done", "missing"]
    assert folder.read(spec(8)).message == "5 of 8 rounds"


def test_it_is_apart_from_runs_of_a_fixed_length():
    assert spec(2).key == spec(9).key != dataclasses.replace(spec(2), extendable=False).key


def test_a_schedule_over_all_rounds_cannot_be_continued():
    plan = ladder_plan(lr_schedule="cosine")
    with pytest.raises(BadInputError, match="lr_schedule"):
        climb_plan(plan, Made(lambda *_: 0.5))
    climb_plan(ladder_plan(lr_schedule="cosine", lr_schedule_options={"over": 99}), Made(lambda *_: 0.5))


def test_a_sweep_climbs_is_continued_and_chooses_from_the_last_rung(tmp_path):
    plan = ladder_plan()
    results = run_sweep(plan, tmp_path / "a", workers=InProcess())
    assert StudyPlan.from_table(plan.as_table()).as_table() == plan.as_table()
    tried = {r.spec.config.method: set() for r in results}
    for result in results:
        tried[result.spec.config.method].add((result.spec.config.lr, result.spec.config.hyper.get("lam")))
    assert len(tried["fedavg"]) >= 6  # as many as feddpc: three rates and three between
    choices = choose_both(results, plan)
    assert {choice.rounds for choice in choices} == {8}
    assert all(len(choice.results) == 2 for choice in choices)
    assert {choice.method for choice in choices} == {"fedavg", "feddpc"}
    files = records(tmp_path / "a")
    again = run_sweep(plan, tmp_path / "a", workers=InProcess())
    assert numbers(again) == numbers(results)
    assert records(tmp_path / "a") == files
    assert numbers(gather(plan, [tmp_path / "a"])) == numbers(results)
    assert not list((tmp_path / "a" / "items").glob("*/checkpoint"))  # nothing is left to continue


def test_a_ladder_is_for_grids():
    with pytest.raises(BadInputError, match="--grid"):
        dataclasses.replace(ladder_plan(), space=Space.random({"lr": "log:1e-3:1"}, 3))
