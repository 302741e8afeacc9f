"""Which runs are asked for: the paper's grid, its controls, and what parts share."""

import collections

import pytest

from feddpc.errors import BadInputError
from feddpc.paper import planned_rows, published
from feddpc.paper.study import PaperStudy
from feddpc.paper.study_spec import DOUBLED, ROWS, PaperSpec, data_of
from feddpc.paper.tuned import MOMENTUM, Setting, Tuned
from feddpc.study import RunSpec

BEST = {name: {"test": Setting(0.1), "validation": Setting(0.01)} for name in ROWS}
TUNED = Tuned("made up", {0.2: BEST, 0.6: BEST})
DIGITS = PaperSpec("digits", "tiny", seeds=(0, 1), select="test")


def test_the_ladder_begins_with_the_papers_grid_and_as_many_settings_for_all():
    spec = PaperSpec("cifar10", "paper")
    for alpha in spec.alphas:
        trials = planned_rows.ladder(spec, alpha)
        counts = collections.Counter(trial.group for trial in trials)
        assert counts == dict.fromkeys(ROWS, 20)
        assert all(trial.config.validation == 0.1 and trial.config.alpha == alpha for trial in trials)
        assert len({trial.label for trial in trials}) == len(trials)
        for name in ROWS:
            assert set(published.RATES) <= {t.config.lr for t in trials if t.group == name}
        assert all((t.config.lr == t.config.server_lr) == (t.group != DOUBLED) for t in trials)


def test_the_ladder_tries_each_setting_once():
    mine = [t.config for t in planned_rows.ladder(PaperSpec("cifar10", "paper"), 0.2) if t.config.method == "fedcm"]
    assert sorted((c.lr, c.hyper["alpha"]) for c in mine) == sorted(
        (lr, value) for lr in (1, 0.1, 0.01, 0.001, 0.0001) for value in (1, 0.1, 0.01, 0.001)
    )


def test_momentum_and_lambda_zero_are_tuned_with_the_same_budget():
    trials = planned_rows.ladder(PaperSpec("cifar10", "paper"), 0.2)
    momenta = {t.config.hyper["momentum"] for t in trials if t.group == "fedavgm"}
    beyond = [t.config for t in trials if t.group == MOMENTUM]
    assert len(momenta) == 4
    assert {c.method for c in beyond} == {"feddpc"}
    assert {c.hyper["lam"] for c in beyond} >= {0.0, 1.0}
    assert all(c.hyper["momentum"] > 0 for c in beyond)
    assert {t.config.hyper["momentum"] for t in trials if t.group == "feddpc"} == {0.0}


def test_the_control_multiplies_the_server_step_alone():
    lines = {line.name: line.config for line in planned_rows.table2(DIGITS, TUNED)}
    assert (lines[DOUBLED].method, lines[DOUBLED].lr, lines[DOUBLED].server_lr) == ("fedavg", 0.1, 0.2)
    for line in planned_rows.figure5(DIGITS, 0.1):
        if line.name.startswith("step"):
            factor = float(line.name.split()[1])
            assert line.config.server_lr == pytest.approx(factor * line.config.lr)
            assert line.label == f"FedAvg, step x{factor:g}"


def test_each_lambda_has_its_control():
    names = [line.name for line in planned_rows.figure5(DIGITS, 0.1)]
    assert names[:7] == [f"lambda {lam:g}" for lam in (3, 2, 1, 0.1, 0, -0.1, -0.5)]
    assert names[7:] == [f"step {step:g}" for step in (4, 3, 2, 1.1, 1, 0.9, 0.5)]


def test_parts_share_runs():
    """FedDPC at the same rate is one run in Table 2, the ablation and the study of lambda; so is the doubled step."""
    lines = planned_rows.rows(("table2", "figure4", "figure5"), DIGITS, TUNED)
    keys = {(line.part, line.alpha, line.name): RunSpec(line.with_seed(0)).key for line in lines}
    assert keys["table2", 0.2, "feddpc"] == keys["figure4", 0.2, "feddpc"] == keys["figure5", 0.2, "lambda 1"]
    assert keys["table2", 0.2, DOUBLED] == keys["figure4", 0.2, DOUBLED] == keys["figure5", 0.2, "step 2"]
    assert keys["table2", 0.2, "fedavg"] == keys["figure5", 0.2, "step 1"]
    assert keys["table2", 0.2, "feddpc"] != keys["table2", 0.6, "feddpc"]
    assert keys["figure4", 0.2, "no scaling"] != keys["figure4", 0.2, "neither"]


def test_figures_4_and_5_have_one_alpha():
    asked = PaperSpec("digits", "tiny", alphas=(0.6, 0.2))
    for line in (*planned_rows.figure4(asked, 0.1), *planned_rows.figure5(asked, 0.1)):
        assert (line.alpha, line.config.alpha, line.config.partition_options["alpha"]) == (0.6, 0.6, 0.6)


def test_the_rate_of_the_ablation_is_the_papers_where_it_has_one():
    assert planned_rows.ablation_rate(PaperSpec("cifar10", "paper"), Tuned("nowhere")) == 0.1
    assert planned_rows.ablation_rate(PaperSpec("digits", "tiny", select="validation"), TUNED) == 0.01


def test_a_setting_that_is_not_known_says_how_it_is_found():
    with pytest.raises(
        BadInputError, match=r"run `feddpc reproduce table2 --data cifar100 --alpha 0.2 --ladder` first"
    ):
        planned_rows.table2(PaperSpec("cifar100", "paper"), Tuned("nowhere"))


def test_rows_without_a_setting_are_left_out_unless_they_were_asked_for():
    some = Tuned("made up", {0.2: BEST, 0.6: {k: v for k, v in BEST.items() if k not in ("fedavgm", MOMENTUM)}})
    spec = PaperSpec("cifar100", "paper")
    assert spec.left_out(some) == {0.6: ["fedavgm", MOMENTUM]}
    planned = [(line.alpha, line.name) for line in planned_rows.table2(spec, some)]
    known = [(0.2, name) for name in ROWS] + [(0.6, name) for name in ROWS if name not in ("fedavgm", MOMENTUM)]
    assert planned == known
    with pytest.raises(BadInputError, match="no setting of fedavgm"):
        planned_rows.table2(PaperSpec("cifar100", "paper", rows=("feddpc", "fedavgm")), some)


def test_rounds_and_rows_can_be_cut_and_the_question_says_so():
    asked = PaperSpec(
        "cifar100", "paper", changes={"rounds": 100}, rows=("feddpc", "fedcm"), rates=(0.1,), values=(0.1, 0.01)
    )
    assert asked.short == "100 of the paper's 800 rounds"
    assert asked.slug == "paper-100-rounds"
    exact, fast = (PaperSpec("cifar100", "paper", changes={"precision": p}) for p in ("float32", "bf16"))
    assert (exact.slug, fast.slug) == ("paper", "paper-bf16")  # they are not to be mixed
    assert (
        PaperStudy("cifar100", fast.slug, fast.short, planned_rows.table2(fast, TUNED)).title
        == "CIFAR-100, the paper's scale, bf16"
    )
    assert "part of it: rates 0.1, values 0.1, 0.01" in asked.ladder_words
    assert collections.Counter(t.group for t in planned_rows.ladder(asked, 0.2)) == {"feddpc": 1, "fedcm": 2}
    several = PaperSpec("digits", "tiny", ladder_seeds=(3, 4))
    assert "seeds 3, 4 on the last rung" in several.ladder_words
    assert "part of it" not in PaperSpec("cifar100", "paper").ladder_words
    assert PaperSpec("digits", "tiny", changes={"rounds": 9}).short.endswith("rounds, 4 of 20 clients, a small MLP")
    assert PaperSpec("cifar10", "paper", changes={"rounds": 400}).short == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": "large"}, "unknown scale 'large'"),
        ({"rows": ("fedmoon",)}, "unknown row of Table 2 'fedmoon'"),
        ({"seeds": (0, 0)}, "seeds = 0, 0: give at least one, and none twice"),
        ({"alphas": ()}, "alphas = : give at least one"),
        ({"select": "luck"}, "unknown selection 'luck'"),
        ({"data": "mnist"}, "unknown preset 'mnist'"),
    ],
)
def test_bad_questions(changes, words):
    with pytest.raises(BadInputError, match=words):
        PaperSpec(**{"data": "digits", "scale": "tiny", **changes})


def test_data_of_targets():
    three = ["cifar10", "cifar100", "tiny-imagenet"]
    assert list(data_of("table2", None)) == list(data_of("all", None)) == three
    assert [data_of(f"figure{n}", None) for n in (1, 2, 3)] == [{name: ("table2",)} for name in three]
    assert data_of("figure4", None) == {"cifar10": ("figure4",)}
    assert data_of("all", None)["cifar100"] == ("table2",)
    assert data_of("figure3", ["digits"]) == {"digits": ("table2",)}
    with pytest.raises(BadInputError, match="figure2 is that of cifar100: for the curves of cifar10 ask for figure1"):
        data_of("figure2", ["cifar10"])
    with pytest.raises(BadInputError, match="unknown preset 'cifar11': did you mean 'cifar10'"):
        data_of("table2", ["cifar11"])


def test_every_row_of_the_paper_is_asked_for():
    assert ROWS[: len(published.METHODS)] == published.METHODS
    assert [line.name for line in planned_rows.table2(DIGITS, TUNED)] == [*ROWS, *ROWS]
