"""What is tried: grids, draws and Optuna's samplers, the same for the same seed."""

import math

import pytest

from feddpc.errors import BadInputError
from feddpc.study import Space, StudyPlan
from feddpc.study.adaptive import SAMPLERS
from feddpc.study.overrides import Overrides
from feddpc.study.plan import differences, make_space
from feddpc.study.space import Categorical, Range, parse, spelled, values

AXES = {"lr": "log:1e-4:1", "epochs": "int:1:4", "lam": "uniform:0:2", "guard": "zero,soft"}


def plan(space, methods=("feddpc", "fedprox", "fedavg"), seeds=(0,), validation=0.1, **more):
    return StudyPlan(methods, seeds, Overrides({"rounds": 3, "validation": validation}), space, **more)


def drawn(space, keys=tuple(AXES)):
    return space.search(keys).ask()


def test_a_grid_is_every_combination_in_order():
    space = Space.grid({"lr": [0.1, 0.01], "hyper.lam": [0.5, 1.0]})
    both = [{"lr": lr, "hyper.lam": lam} for lr in (0.1, 0.01) for lam in (0.5, 1.0)]
    search = space.search(["lr", "hyper.lam"])
    assert (search.ask(), search.ask()) == (both, [])
    assert (space.size(["lr", "hyper.lam"]), space.size(["lr"]), space.size([])) == (4, 2, 1)
    assert drawn(space, []) == [{}]


def test_random_draws_depend_on_the_seed_and_on_nothing_else():
    space = Space.random(AXES, 30, seed=5)
    assert drawn(space) == drawn(Space.random(AXES, 30, seed=5))
    assert drawn(space) != drawn(Space.random(AXES, 30, seed=6))
    assert drawn(space)[:10] == drawn(Space.random(AXES, 10, seed=5))
    alone = [trial["lr"] for trial in drawn(Space.random({"lr": AXES["lr"]}, 30, seed=5), ["lr"])]
    assert [trial["lr"] for trial in drawn(space)] == alone  # so all methods get the same rates


def test_draws_fill_their_ranges():
    trials = drawn(Space.random(AXES, 2000))
    rates = sorted(math.log10(trial["lr"]) for trial in trials)
    assert -4 <= rates[0] < -3.99
    assert -0.01 < rates[-1] <= 0
    assert rates[1000] == pytest.approx(-2, abs=0.15)  # evenly in the logarithm
    for epochs in (1, 2, 3, 4):
        assert sum(trial["epochs"] == epochs for trial in trials) == pytest.approx(500, abs=80)
    assert {trial["guard"] for trial in trials} == {"zero", "soft"}
    assert max(trial["lam"] for trial in trials) <= 2
    whole = [Range("logint", 1, 100).draw(rng) for rng in map(_rng, range(500))]
    assert (min(whole), max(whole), all(isinstance(n, int) for n in whole)) == (1, 100, True)


def _rng(seed):
    from feddpc.rng import generator

    return generator(seed, "test")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_is_deterministic_and_stays_in_its_budget(sampler):
    def go(seed):
        search = Space.optuna(AXES, 13, sampler, seed=seed, batch=4).search(list(AXES))
        batches = []
        while batch := search.ask():
            search.tell([-abs(math.log10(trial["lr"]) + 1) for trial in batch])
            batches.append(batch)
        return batches

    once = go(3)
    assert once == go(3)
    assert once != go(4)
    assert [len(batch) for batch in once] == [4, 4, 4, 1]
    for trial in (t for batch in once for t in batch):
        assert 1e-4 <= trial["lr"] <= 1
        assert trial["epochs"] in (1, 2, 3, 4)
        assert trial["guard"] in ("zero", "soft")


def test_a_search_learns_from_what_it_is_told():
    """TPE comes nearer to the best rate than as many blind draws."""

    def miss(search, told):
        worst = []
        while batch := search.ask():
            misses = [abs(math.log10(trial["lr"]) + 1) for trial in batch]
            search.tell([-m if told else 0.0 for m in misses])
            worst = misses
        return sum(worst) / len(worst)

    axes = {"lr": "log:1e-4:1"}
    gain = [
        miss(Space.optuna(axes, 30, "tpe", seed=s).search(["lr"]), False)
        - miss(Space.optuna(axes, 30, "tpe", seed=s).search(["lr"]), True)
        for s in range(4)
    ]
    assert sum(gain) / len(gain) > 0.2


def test_a_trial_that_failed_ends_no_search():
    search = Space.optuna({"lr": "log:1e-4:1"}, 4, batch=2).search(["lr"])
    first = search.ask()
    search.tell([None, 0.5])
    assert len(first) == len(search.ask()) == 2


def test_keys_go_to_the_methods_that_have_them():
    space = Space.grid({"lr": [0.1, 0.2], "lam": [0.5, 1], "fedprox.mu": [1, 2, 3]})
    assert plan(space).budgets() == {"feddpc": 4, "fedprox": 6, "fedavg": 2}
    items = plan(space, seeds=(0, 1)).specs("fedprox", {"lr": 0.2, "fedprox.mu": 3})
    assert [(i.config.lr, i.config.hyper, i.config.seed) for i in items] == [(0.2, {"mu": 3}, s) for s in (0, 1)]
    assert items[0].name == "fedprox lr=0.2 mu=3 seed 0"


def test_all_methods_leave_the_same_samples_to_the_server():
    overrides = Overrides({"validation": 0.1})
    both = StudyPlan(["fedavg", "datasharing"], [0], overrides, Space.grid({"lr": [0.1]}))
    shares = {name: both.specs(name, {"lr": 0.1})[0].config.reserve for name in both.methods}
    assert shares["fedavg"] == shares["datasharing"] > 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Space.grid({}), "something to vary"),
        (lambda: Space.grid({"lr": [0.1, 0.1]}), "there twice"),
        (lambda: Space.grid({"lr": []}), "at least one value"),
        (lambda: drawn(Space({"lr": Range("log", 0.1, 1)}), ["lr"]), "a grid has no end"),
        (lambda: Space.random({"lr": "log:0:1"}, 3), "begins above 0"),
        (lambda: Space.random({"lr": "log:1:0.1"}, 3), "must be above the first"),
        (lambda: Space.random({"lr": "log:1"}, 3), "KIND:LOW:HIGH"),
        (lambda: Space.random({"epochs": "int:1:2.5"}, 3), "whole numbers"),
        (lambda: Space.random({"lr": "log:1e-3:1"}, 0), "trials = 0"),
        (lambda: Space.optuna({"lr": "log:1e-3:1"}, 5, "tp"), "did you mean 'tpe'"),
        (lambda: Space({"lr": Range("log", 0.1, 1)}, sampler="tpe"), "needs trials"),
        (lambda: plan(Space.grid({"mo": [1]})), "unknown key 'mo'"),
        (lambda: plan(Space.grid({"fedcm.alpha": [1]})), "unknown key 'fedcm.alpha'"),
        (lambda: plan(Space.grid({"engine": ["loop"]})), "engine does not change"),
        (lambda: plan(Space.grid({"seed": [1, 2]})), "seeds"),
        (lambda: plan(Space.grid({"lr": [1]}), seeds=(0, 0)), "none twice"),
        (lambda: plan(Space.grid({"lr": [1]}), methods=()), "at least one"),
        (lambda: plan(Space.grid({"lr": [1]}), validation=0.0), "needs validation data"),
        (lambda: make_space([], [], None, None, 0, None), "say what to vary"),
        (lambda: make_space(["lr=1"], ["lr=log:1:2"], 1, None, 0, None), "either --grid"),
        (lambda: make_space(["lr=1", "lr=2"], [], None, None, 0, None), "lr is there twice"),
        (lambda: make_space(["lr"], [], None, None, 0, None), "write KEY="),
        (lambda: make_space(["lr="], [], None, None, 0, None), "with commas between"),
        (lambda: make_space(["lr=1"], [], 3, None, 0, None), "are for --random"),
        (lambda: make_space([], ["lr=log:1:2"], None, None, 0, None), "--trials N"),
    ],
)
def test_mistakes_are_said(make, said):
    with pytest.raises(BadInputError, match=said):
        make()


@pytest.mark.parametrize("listed", [[0.1, 3, True, "soft"], [[8], [16, 8]], [1e-17, 0.1 + 0.2]])
def test_values_are_read_back_as_they_were(listed):
    assert values(spelled(listed)) == listed
    assert parse(str(Categorical(tuple(listed)))).values == tuple(listed)


@pytest.mark.parametrize("text", ["log:0.0001:1", "uniform:-1:2.5", "int:1:8", "logint:1:1024"])
def test_ranges_are_read_back_as_they_were(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "space",
    [
        Space.grid({"lr": [0.1, 0.3], "feddpc.guard": ["zero", "soft"]}),
        Space.random(AXES, 7, seed=2),
        Space.optuna(AXES, 7, "gp", seed=2, batch=3),
    ],
    ids=["grid", "random", "optuna"],
)
def test_a_plan_survives_its_file(space):
    overrides = Overrides(
        {"rounds": 3, "validation": 0.1, "model": "mlp", "model_options": {"hidden": [8]}, "engine": "loop"},
        {"fedprox": {"mu": 0.5}},
    )
    made = StudyPlan(["feddpc", "fedprox"], [0, 2], overrides, space, "validation")
    again = StudyPlan.from_table(made.as_table())
    assert differences(made, again) == {}
    for method in made.methods:
        asked = made.searches()[method].ask()
        assert asked == again.searches()[method].ask()
        ours, theirs = ([i.key for i in p.specs(method, asked[0])] for p in (made, again))
        assert ours == theirs
    longer = StudyPlan(
        ["feddpc"], [0, 2], Overrides({**overrides.values, "rounds": 4}, overrides.hyper), space, "validation"
    )
    assert list(differences(made, longer).values()) == [
        "methods = ['feddpc'], was ['feddpc', 'fedprox']",
        "rounds = 4, was 3",
    ]
