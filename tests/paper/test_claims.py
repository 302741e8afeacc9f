"""Verdicts on made-up outcomes: what is clear holds or does not, what is within the spread cannot be told."""

import dataclasses

import pytest

from feddpc.paper import documents, presets, published
from feddpc.paper.claims import POORLY, findings, rounds_to, summary
from feddpc.paper.significance import paired
from feddpc.paper.study import PaperStudy
from feddpc.paper.study_spec import DOUBLED
from feddpc.paper.verdicts import above, compare, judge, show_p, standing
from made_up import PAPERS_ORDER, row, stored, table2


def verdicts(rows, **changes):
    study = dataclasses.replace(PaperStudy("digits", "tiny", "", rows), **changes)
    return {f.claim: f.verdict for f in findings(study)}


def one(found, words):
    """The verdict of the one claim that contains ``words``."""
    (verdict,) = [v for claim, v in found.items() if words in claim]
    return verdict


def test_the_papers_outcome_holds():
    found = verdicts(table2(**PAPERS_ORDER))
    assert one(found, "highest best accuracy") == "holds"
    assert one(found, "paper's order") == "holds"
    assert one(found, "higher best accuracy than FedAvg with the server step doubled") == "holds"
    assert found["alpha 0.2, control: FedDPC has a higher best accuracy than FedAvg"] == "holds"


def test_the_opposite_does_not_hold():
    upside_down = {name: 1 - value for name, value in PAPERS_ORDER.items()}
    found = verdicts(table2(**upside_down))
    for words in ("highest best accuracy", "paper's order", "fewer rounds", "FedAvg with the server step doubled"):
        assert "holds" not in {v for claim, v in found.items() if words in claim}
    assert one(found, "highest best accuracy") == "does not hold"
    assert one(found, "paper's order") == "does not hold"


def test_one_rival_above_is_enough_for_does_not_hold():
    found = verdicts(table2(**PAPERS_ORDER | {"fedcm": 0.80}))
    assert one(found, "highest best accuracy") == "does not hold"


def test_one_rival_within_the_spread_is_enough_for_cannot_be_told():
    rows = [r for r in table2(**PAPERS_ORDER) if r.name != "fedcm"]
    rows.append(row("table2", "fedcm", [0.60, 0.80, 0.65, 0.78, 0.66], text="FedCM"))
    found = verdicts(rows)
    assert one(found, "highest best accuracy") == "cannot be told"


def test_one_seed_decides_nothing():
    rows = [row("table2", name, [value]) for name, value in (("feddpc", 0.9), ("fedprox", 0.1), ("fedavg", 0.2))]
    found = findings(PaperStudy("digits", "tiny", "", rows))
    assert {f.verdict for f in found} == {"cannot be told"}
    assert any("one seed" in f.numbers for f in found)


def test_nothing_is_claimed_of_what_was_not_run():
    assert findings(PaperStudy("digits", "tiny", "")) == []
    assert findings(PaperStudy("digits", "tiny", "", [row("table2", "fedprox", [0.5, 0.6])])) == []
    alone = findings(PaperStudy("digits", "tiny", "", [row("table2", "feddpc", [0.5, 0.6])]))
    assert alone == []


def test_what_is_best_of_some_is_not_best_of_all(study):
    some = [r for r in table2(**PAPERS_ORDER) if r.name != "fedcm"]
    found = {f.claim: f for f in findings(PaperStudy("digits", "tiny", "", some))}
    best = found["alpha 0.2: FedDPC has the highest best accuracy of the paper's methods"]
    assert best.verdict == "cannot be told"
    assert best.numbers.endswith("; not run: FedCM")
    lams = [r for r in study.part("figure5") if r.name != "lambda 3"]
    assert one(verdicts(lams), "lambda = 1, which the paper takes") == "cannot be told"
    beaten = [*some, row("table2", "fedcm", [], seeds=(0,)), row("table2", "fedga", [0.9, 0.91, 0.92, 0.9, 0.9])]
    assert one(verdicts(beaten), "highest best accuracy") == "does not hold"


def test_rounds_to_an_accuracy():
    run = stored(presets.preset("digits", scale="tiny"), (0.1, 0.5, None, 0.7))
    assert [rounds_to(run, a) for a in (0.05, 0.5, 0.6, 0.7, 0.9)] == [1, 2, 4, 4, 5]


def against_all(ours, best, **more):
    """FedDPC's row and five rivals, alike but for their names."""
    return [ours, *(row("table2", name, best, **more) for name in published.METHODS if name != "feddpc")]


@pytest.mark.parametrize(
    ("best", "rounds", "verdict"), [([0.8, 0.82, 0.84], 1, "holds"), ([0.2, 0.2, 0.2], 5, "does not hold")]
)
def test_speed_is_about_the_rivals_best_not_about_ones_own(best, rounds, verdict):
    """All have their best in round 4, but FedDPC is past the rivals' best in round 1; or never, which counts as 5."""
    rows = against_all(row("table2", "feddpc", best), [0.3, 0.31, 0.35])
    (sooner,) = [f for f in findings(PaperStudy("digits", "tiny", "", rows)) if "fewer rounds" in f.claim]
    assert sooner.numbers.startswith(f"rounds: {rounds} against 4 of fedprox; {rounds} against 4 of fedexp")
    assert sooner.verdict == verdict


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [((1.0, 1.01, 1.02), "holds"), ((1.3, 1.31, 1.32), "does not hold"), ((0.9, 1.0, 1.5), "cannot be told")],
)
def test_a_competitive_time(seconds, verdict):
    """Against the median of the others, seed by seed: one slow seed, as on a busy machine, decides nothing."""
    rows = [row("table2", "feddpc", [0.5, 0.6, 0.7])]
    rows += [
        row("table2", n, [0.5, 0.6, 0.7], seconds=s) for n, s in (("fedprox", 0.5), ("fedcm", 1.0), ("fedga", 9.0))
    ]
    for run, s in zip(rows[0].runs.values(), seconds, strict=True):
        run.records[:] = [{**record, "seconds": s} for record in run.records]
    assert one(verdicts(rows), "competitive time") == verdict
    packed = findings(PaperStudy("digits", "tiny", "", rows, {"at_once": 4}))
    assert [f.verdict for f in packed if "competitive time" in f.claim] == ["cannot be told"]


def test_the_angle_to_the_last_update():
    for cosine, verdict in ((0.2, "holds"), (-0.2, "does not hold")):
        rows = [row("table2", "feddpc", [0.5, 0.6], mean_cosine=cosine, mean_scale=2.0)]
        assert one(verdicts(rows), "90 degrees") == verdict


def test_training_loss_should_be_lower():
    for ours, verdict in ((0.5, "holds"), (1.5, "does not hold")):
        rows = against_all(row("table2", "feddpc", [0.5, 0.6], loss=ours), [0.5, 0.6], loss=1.0)
        found = findings(PaperStudy("digits", "tiny", "", rows))
        (loss,) = [f for f in found if "training loss" in f.claim]
        assert loss.verdict == verdict
        assert loss.numbers.startswith(f"loss, against fedprox {ours - 1.0:+.2f}")


def test_the_ablation(study):
    found = verdicts(study.part("figure4"))
    for first, second in (("projection only", "neither"), ("FedDPC", "projection only")):
        for words in ("raises test accuracy faster", "lowers training loss faster", "has a higher best accuracy"):
            (verdict,) = [v for c, v in found.items() if c.startswith(f"{first} {words}") and second in c]
            assert verdict == "holds"
    assert one(found, "control: FedDPC has a higher best accuracy than FedAvg, step x2") == "cannot be told"


def test_lambda(study):
    found = verdicts(study.part("figure5"))
    assert one(found, "lambda = 1, which the paper takes") == "holds"
    assert one(found, "lambda = 2 performs well") == "holds"
    assert one(found, "lambda = -0.5 performs very poorly") == "holds"
    assert one(found, "breaks off below zero, at lambda = -0.5") == "holds"
    assert one(found, "breaks off below zero, at lambda = -0.1") == "does not hold"
    assert one(found, "lambda = 1 has a higher best accuracy than FedAvg with its step times 2") == "holds"
    near = [r for r in study.part("figure5") if r.name != "lambda -0.1"]
    near.append(row("figure5", "lambda -0.1", [0.70 - POORLY / 2 + w for w in (-0.011, 0.0, 0.011)]))
    assert one(verdicts(near), "lambda = -0.1 performs very poorly") == "does not hold"


def test_several_comparisons_of_one_claim_are_corrected():
    """Each alone is below 5 %, all four together are not: Holm's correction decides."""
    ours = row("x", "feddpc", [0.50, 0.52, 0.54])
    rivals = [row("x", f"r{i}", [0.45, 0.46, 0.50 + 0.001 * i]) for i in range(4)]
    assert above("x", "", ours, rivals[:1]).verdict == "holds"
    assert above("x", "", ours, rivals).verdict == "cannot be told"
    assert judge([]) == "cannot be told"


def page(rows):
    """The page of a study with these rows."""
    return documents.pages([PaperStudy("digits", "tiny", "short", rows)], "images")["reproduction-digits.md"]


def test_where_ours_stands_is_said_only_where_seeds_decide():
    ours = row("table2", "feddpc", [0.50, 0.52, 0.51], text="FedDPC")
    rivals = [
        row("table2", "fedprox", [0.40, 0.421, 0.409], text="FedProx"),
        row("table2", "fedcm", [0.60, 0.621, 0.609], text="FedCM"),
        row("table2", "fedga", [0.30, 0.70, 0.53], text="FedGA"),
        row("table2", "fedexp", [0.10], text="FedExP"),  # one seed in common decides nothing
    ]
    places = {"above": ["FedProx"], "below": ["FedCM"], "not to be told from": ["FedGA", "FedExP"]}
    assert standing(compare(ours, rivals, "best")) == places
    told = page([ours, *rivals])
    assert "Decided over 3 seeds: FedDPC is above FedProx; below FedCM; not to be told from FedGA / FedExP." in told
    alone = row("table2", "feddpc", [0.5], text="FedDPC")
    told = page([alone, *rivals])
    assert "One seed: nothing is decided." in told
    told = page([ours, rivals[2]])
    assert "Over 3 seeds nothing is decided." in told


def test_p_values_are_never_shown_as_zero():
    assert show_p(0.0) == "<0.001"


def test_each_claim_of_the_paper_names_its_line(study):
    found = findings(study)
    assert all((f.line is None) == ("control" in f.claim) for f in found)
    assert {f.part for f in found} == {"table2", "figure4", "figure5"}


def test_the_summary_has_three_lines(study):
    """What FedDPC is above, below, and cannot be told from: in Table 2; without it, in the figures."""
    rows = [r for r in table2(**PAPERS_ORDER | {"fedcm": 0.80}) if r.name != DOUBLED]
    rows.append(row("table2", DOUBLED, [0.5, 0.9, 0.7, 0.8, 0.6], text="FedAvg, step x2"))
    lines = summary(PaperStudy("digits", "tiny", "", rows), ("grid", "table2"))
    assert [line.partition(": ")[0] for line in lines] == [
        "FedDPC is above",
        "FedDPC is below",
        "It cannot be told from",
    ]
    assert lines[1].endswith("alpha 0.2: FedCM")
    assert "FedAvg, step x2" in lines[2]
    assert summary(PaperStudy("digits", "tiny", ""), ("table2",)) == []
    assert "projection only" in summary(study, ("figure4",))[0]
    assert "lambda" in " ".join(summary(study, ("figure5",)))


def test_a_comparison_has_one_p_value_in_all_parts():
    """Of the same runs in Table 2 and figure 4: the family of Table 2 corrects it, and figure 4 takes that over."""
    noisy = {"feddpc": [0.70, 0.72, 0.71], "fedprox": [0.60, 0.66, 0.61]}
    rows = [row("table2", name, values, text=name) for name, values in noisy.items()]
    rows.append(row("table2", DOUBLED, [0.68, 0.71, 0.69], text="FedAvg, step x2"))
    rows += [dataclasses.replace(r, part="figure4") for r in rows if r.name in ("feddpc", DOUBLED)]
    found = findings(PaperStudy("digits", "tiny", "", rows))
    told = [f.numbers for f in found if "FedAvg, step x2" in f.numbers and "points over" in f.numbers]
    best = {numbers.split("p ")[-1] for numbers in told if "+1.67" in numbers}
    assert len(best) == 1
    assert best != {show_p(paired(rows[0].values("best"), rows[2].values("best")).p) + ")"}
