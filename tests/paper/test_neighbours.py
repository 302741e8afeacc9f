"""No setting that comes with feddpc for digits can be bettered by hand: its neighbours on the grid are not better."""

import pytest

from feddpc.paper import planned_rows, published
from feddpc.paper.study_spec import COMBINATIONS, HELD_OUT, ROWS, PaperSpec
from feddpc.paper.tuned import TUNED_KEYS, Setting, known
from feddpc.study import InProcess, RunSpec, run_study

#: Points of accuracy, as a share, by which a neighbour may be better: less than the seeds' standard deviation.
TOLERANCE = 0.01
SEEDS = (0, 1, 2, 3, 4)


def grids(name):
    """The values that the ladder begins with, by key."""
    grid = {"lr": published.RATES}
    for key in TUNED_KEYS.get(name, ()):
        grid[key] = published.VALUES if name in published.TUNED else {one[key] for one in COMBINATIONS[name]}
    return grid


def neighbours(name, setting):
    """The settings that differ in one key by one place of the grid."""
    values = {"lr": setting.lr, **setting.hyper}
    for key, grid in grids(name).items():
        lower, higher = ([v for v in grid if v < values[key]], [v for v in grid if v > values[key]])
        for value in (*sorted(lower)[-1:], *sorted(higher)[:1]):
            yield {**values, key: value}


def test_neighbours_are_one_place_away():
    around = list(neighbours("fedprox", Setting(0.562, {"mu": 0.01})))
    assert around == [{"lr": lr, "mu": 0.01} for lr in (0.1, 1.0)] + [{"lr": 0.562, "mu": mu} for mu in (0.001, 0.1)]


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 0.6])
@pytest.mark.parametrize("name", ROWS)
def test_no_neighbour_is_better(name, alpha, tmp_path):
    """Best accuracy on held-out samples, by which settings are chosen, mean over five seeds."""
    spec = PaperSpec("digits", "small")
    setting = spec.best(known("digits", tmp_path), alpha, name)
    tried = [{"lr": setting.lr, **setting.hyper}, *neighbours(name, setting)]
    trials = [planned_rows.trial(spec, alpha, name, values) for values in tried]
    assert all(trial.config.validation == HELD_OUT for trial in trials)
    rounds = trials[0].config.rounds
    specs = [RunSpec(one.config) for trial in trials for one in trial.specs(rounds, SEEDS)]
    results = iter(run_study(specs, tmp_path, workers=InProcess()))
    means = []
    for _ in trials:
        mine = [next(results) for _ in SEEDS]
        means.append(sum(r.validation for r in mine) / len(SEEDS) if all(r.status == "done" for r in mine) else 0.0)
    better = {str(values): mean for values, mean in zip(tried, means, strict=True) if mean > means[0] + TOLERANCE}
    print(f"{name}, alpha {alpha}: {means[0]:.4f}, neighbours {', '.join(f'{mean:.4f}' for mean in means[1:])}")
    assert not better, f"{name} at {tried[0]} has {means[0]:.4f}"
