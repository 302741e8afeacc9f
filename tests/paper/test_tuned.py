"""The choice of settings, and the file that keeps them."""

import dataclasses
import re

import pytest

from feddpc.errors import RunFolderError
from feddpc.paper import presets
from feddpc.paper.study import PaperRow
from feddpc.paper.study_spec import ROWS
from feddpc.paper.tuned import MOMENTUM, Setting, Tuned, known, setting_of, winners
from made_up import stored


def candidate(name, lr, test, validation, *, status="finished", there=True, **hyper):
    """A row of the grid: best on test in round 2, on held-out samples in round 3, where the test has lost 5 points."""
    config = presets.preset(
        "digits", name.partition(" ")[0], scale="tiny", rounds=3, lr=lr, hyper=hyper, validation=0.1
    )
    about = PaperRow("grid", 0.2, f"{name} lr={lr:g}", name, config, (0,))
    run = stored(config, [0.1, test, test - 0.05], status=status)
    for record, value in zip(run.records, (0.1, validation - 0.05, validation), strict=True):
        record["validation_accuracy"] = value
    return dataclasses.replace(about, runs={0: run} if there else {})


def test_test_and_validation_choose_for_themselves():
    rows = [candidate("fedprox", 1.0, 0.5, 0.9, mu=1.0), candidate("fedprox", 0.1, 0.8, 0.6, mu=0.1)]
    chosen = winners(rows)["fedprox"]
    assert setting_of(chosen["test"]) == Setting(0.1, {"mu": 0.1})
    assert setting_of(chosen["validation"]) == Setting(1.0, {"mu": 1.0})
    # The test accuracy of a choice on validation is that of the round which validation chose: the last, not the best.
    assert chosen["validation"].estimate("validated").mean == pytest.approx(0.45)


def test_what_diverged_or_is_missing_is_not_chosen():
    rows = [
        candidate("feddpc", 1.0, 0.99, 0.99, status="diverged"),
        candidate("feddpc", 0.1, 0.98, 0.98, there=False),
        candidate("feddpc", 0.01, 0.5, 0.5),
    ]
    assert setting_of(winners(rows)["feddpc"]["test"]) == Setting(0.01)
    assert winners(rows[:2]) == {}


def test_equal_scores_go_to_the_first_tried():
    rows = [candidate("fedavg", lr, 0.7, 0.7) for lr in (1.0, 0.1)]
    assert setting_of(winners(rows)["fedavg"]["test"]).lr == 1.0


def test_rows_of_one_method_have_their_own_winners():
    rows = [candidate("fedavg", 0.1, 0.5, 0.5), candidate("fedavg x2", 1.0, 0.6, 0.6)]
    assert {name: setting_of(by["test"]).lr for name, by in winners(rows).items()} == {"fedavg": 0.1, "fedavg x2": 1.0}


def test_the_file_gives_back_what_was_written(tmp_path):
    settings = {
        0.2: {"fedprox": {"test": Setting(0.1, {"mu": 0.01})}, "feddpc": {"validation": Setting(1e-4)}},
        0.6: {},
    }
    Tuned("somewhere", settings).write(tmp_path / "tuned.json")
    assert Tuned.read(tmp_path / "tuned.json") == Tuned("somewhere", settings)
    shipped = known("digits", tmp_path / "nothing")
    both = known("digits", tmp_path)  # what a grid found goes before what comes with feddpc, row by row
    assert both.settings[0.2] == shipped.settings[0.2] | settings[0.2]
    assert both.settings[0.6] == shipped.settings[0.6]
    assert both.source == f"somewhere; where that has none, {shipped.source}"
    assert known("tiny-imagenet", tmp_path) == Tuned("somewhere", settings)
    Tuned(shipped.source, settings).write(tmp_path / "tuned.json")
    assert known("digits", tmp_path).source == shipped.source  # the same grid in both is named once


@pytest.mark.parametrize("text", ["{}", "[]", '{"source": "", "settings": {"a": {}}}', "nonsense"])
def test_a_broken_file_says_what_to_do(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"tuned\.json"):
        known("digits", tmp_path)


@pytest.mark.parametrize("data", ["digits", "cifar10", "cifar100"])
def test_these_come_with_settings_for_every_row(tmp_path, data):
    tuned = known(data, tmp_path)
    assert re.search(rf"the paper's grid .*on {data},", tuned.source)
    for alpha in (0.2, 0.6):
        lacking = {"fedavgm", MOMENTUM} if data == "cifar100" else set()
        assert set(tuned.settings[alpha]) == set(ROWS) - lacking
        for chosen in tuned.settings[alpha].values():
            assert set(chosen) == {"test", "validation"}
            assert all(0 < s.lr <= 100 for s in chosen.values())
    assert known("fashion-mnist", tmp_path).settings == {}
