"""What the tables say: ours beside the paper's, the tests, what is missing; and Table 1."""

import csv
import dataclasses
import io

import pytest

from feddpc.paper import documents, presets, published, table1, tables
from feddpc.paper.claims import findings
from feddpc.paper.significance import holm, paired
from feddpc.paper.study import PaperRow, PaperStudy, score
from feddpc.paper.study_spec import ROWS, label
from feddpc.paper.verdicts import show_p
from feddpc.report.table import Table
from made_up import row, stored


def cells(sheet, name):
    """A row of a sheet by its first cell, as a table of headings."""
    (found,) = [r for r in sheet.rows if r[0] == name]
    return dict(zip(sheet.headings, found, strict=True))


def test_ours_stand_beside_the_papers(whole):
    sheet = tables.table2(whole, 0.2)
    ours = cells(sheet, "FedDPC")
    assert ours["best %"].startswith("70.0")
    assert (ours["paper %"], ours["paper's"], ours["paper's s"]) == ("55.44", "372", "0.51")
    assert (ours["round"], ours["s/round"], ours["seeds"]) == ("4", "0.5", "5")
    assert [r[0] for r in sheet.rows] == [label(name) for name in ROWS]
    control = cells(sheet, "FedAvg, step x2")
    assert (control["paper %"], control["paper's"]) == ("-", "-")
    assert cells(tables.table2(whole, 0.6), "FedCM")["paper %"] == "56.06"
    assert sheet.bold == {5}


def test_a_shortened_or_foreign_table_says_so(study, whole):
    for sheet in (tables.table2(study, 0.2), tables.figure(study, "figure4", 0.2), tables.differences(study, 0.2)):
        assert "shortened: 4 of the paper's 400 rounds" in sheet.title
    notes = " ".join(tables.table2(study, 0.2).notes)
    assert "The paper has no digits: its columns are of CIFAR-10" in notes
    assert "Shortened: 4 of the paper's 400 rounds." in notes
    notes = " ".join(tables.table2(whole, 0.2).notes)
    assert "Shortened" not in notes
    assert "no digits" not in notes
    odd = dataclasses.replace(study, rows=[row("table2", "feddpc", [0.5], alpha=0.3)])
    assert "The paper has no alpha 0.3" in " ".join(tables.table2(odd, 0.3).notes)


def test_what_is_missing_or_diverged_is_said():
    rows = [
        row("table2", "feddpc", [0.5, 0.6], seeds=(0, 1, 2, 3), text="FedDPC"),
        row("table2", "fedprox", [], seeds=(0, 1), text="FedProx"),
        row("table2", "fedcm", [0.5], text="FedCM", status="diverged"),
    ]
    sheet = tables.table2(PaperStudy("digits", "tiny", "", rows), 0.2)
    assert "Missing: FedDPC (seed 2, 3); FedProx (seed 0, 1)." in sheet.notes
    assert "Diverged: FedCM (seed 0)." in sheet.notes
    empty = cells(sheet, "FedProx")
    assert (empty["seeds"], empty["best %"], empty["s/round"]) == ("0", "-", "-")
    assert empty["paper %"] == "45.20"
    assert cells(sheet, "FedCM")["best %"] == "50.00"  # one seed has no deviation
    assert cells(sheet, "FedCM")["95 % interval"] == "-"


def test_a_difference_has_one_p_value(study):
    """Corrected for all rows of the table, and the same in the findings."""
    table = tables.differences(study, 0.2)
    ours = study.scored("table2", 0.2)["feddpc"]
    rivals = [r for r in study.part("table2", 0.2) if r is not ours]
    results = [paired(ours.values("best"), r.values("best")) for r in rivals]
    for line, result, p in zip(table.rows, results, holm([r.p for r in results]), strict=True):
        assert line[1] == f"{100 * result.mean:+.2f}"
        assert line[3] == show_p(p)
    assert "5 seeds" in table.notes[0]
    said = [f.numbers for f in findings(study) if f.part == "table2" and f.claim.startswith("alpha 0.2")]
    for name, mean, where, p, *_ in table.rows:
        shown = f"{name} {mean} ({where}, p {p})"
        assert any(shown in numbers for numbers in said)


def test_comparisons_with_too_few_runs():
    rows = [row("table2", "feddpc", [0.5]), row("table2", "fedcm", [0.4]), row("table2", "fedga", [], seeds=(0,))]
    sheet = tables.differences(PaperStudy("digits", "tiny", "", rows), 0.2)
    assert sheet.rows[0][:4] == ["fedcm", "+10.00", "-", "-"]
    assert sheet.rows[1] == ["fedga", *["-"] * 6]
    assert sheet.notes == ["One seed: nothing can be tested."]
    assert tables.differences(PaperStudy("digits", "tiny", "", rows[1:]), 0.2) is None
    assert tables.differences(PaperStudy("digits", "tiny", "", rows[:1]), 0.2) is None


def test_a_score_is_what_the_records_say():
    config = row("table2", "feddpc", [0.5]).config
    accuracy = [0.1, 0.9, *[0.5] * 10]
    run = stored(config, accuracy, loss=range(12), mean_scale=3.0, mean_cosine=0.5)
    run.records[0]["mean_cosine"] = 99.0  # of round 1, which has no last update
    s = score(run)
    assert s.pop("mean") == pytest.approx(sum(accuracy) / 12)
    assert s == {
        **{"best": 0.9, "best_round": 2, "last10": 0.5},
        **{"loss": 5.5, "scale": 3.0, "cosine": 0.5, "seconds": 0.5},
    }
    assert score(stored(config, [None, None])) == {}


def test_a_sheet_is_the_same_in_all_forms(study):
    sheet = tables.table2(study, 0.2)
    assert list(csv.reader(io.StringIO(sheet.csv()))) == [list(sheet.headings), *sheet.rows]
    lines = sheet.markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(sheet.rows)
    assert {line.count("|") for line in table} == {len(sheet.headings) + 1}
    assert sheet.rich().row_count == len(sheet.rows)
    piped = Table("t", "T", ("a",), [["x|y"]]).markdown()
    assert "| x\\|y |" in piped


def test_table_1_agrees_where_the_paper_counts_all():
    local, server = table1.tables("cifar10", "paper")
    assert "d = 62,006, m = 2 batches of n = 256, k' = 10" in local.title
    for name, formula in published.TABLE1.items():
        ours = cells(local, label(name))
        assert ours["paper"] == formula.local_text
        assert float(ours["operations"]) == pytest.approx(62_006 * formula.local(2, 256), rel=1e-3)
        assert (ours["gradients per step"], ours["agrees"]) == ("1", "yes")
        assert float(cells(server, label(name))["operations"]) == pytest.approx(62_006 * formula.server(10), rel=1e-3)
    states = {name: cells(server, label(name))["agree"] for name in published.TABLE1}
    # What the paper's column leaves out: FedCM's and FedDPC's vector, and FedVARP's table of all clients.
    assert states == dict.fromkeys(("fedavg", "fedprox", "fedexp", "fedga"), "yes") | {
        "fedcm": "no",
        "feddpc": "no",
        "fedvarp": "11 times it",
    }
    assert (cells(server, "FedDPC")["down"], cells(server, "FedCM")["down"]) == ("1", "2")


@pytest.mark.parametrize(("data", "d"), [("cifar100", 11_227_812), ("tiny-imagenet", 11_279_112)])
def test_the_size_of_the_papers_models(data, d):
    assert table1.parameters(data, "paper") == d


@pytest.mark.parametrize(
    ("best", "rounds", "begun", "early"),
    [(0.39, 4, False, True), (0.41, 4, True, True), (0.39, 9, False, False)],  # digits: guessing gives a tenth
)
def test_a_short_grid_says_what_it_cannot_tell(best, rounds, begun, early):
    rows = [row("grid", "feddpc", [best], rounds=rounds), row("table2", "feddpc", [0.9], rounds=9)]
    notes = " ".join(tables.grid(PaperStudy("digits", "tiny", "", rows), 0.2).notes)
    assert ("The table has runs of 9 rounds: a setting that is best early" in notes) == early
    assert ("Less than 4 times what guessing gives (10.00 %): FedDPC." in notes) == (not begun)
    study = PaperStudy("digits", "tiny", "", rows)
    assert ("The tuning behind these settings had hardly begun" in " ".join(tables.table2(study, 0.2).notes)) != begun
    assert ("this order says little" in documents.pages([study], "images")["reproduction-digits.md"]) != begun


def test_a_ladder_to_the_end_is_no_short_grid():
    rows = [row("grid", f"feddpc lr={lr}", [0.5], rounds=rounds) for lr, rounds in ((1.0, 4), (0.1, 9))]
    study = PaperStudy("digits", "tiny", "", [*rows, row("table2", "feddpc", [0.9], rounds=9)])
    notes = " ".join(tables.grid(study, 0.2).notes)
    assert "Only settings that ran to the end, 9 rounds, can win." in notes
    assert "best early" not in notes


@pytest.mark.parametrize(
    ("rates", "best", "said"),
    [
        ((1.0, 0.1), 0.1, "Best on validation at the lowest rate that was tried: FedAvg."),
        ((0.1, 0.01), 0.1, "Best on validation at the highest rate that was tried: FedAvg."),
        ((1.0, 0.1, 0.01), 0.1, None),
    ],
)
def test_a_winner_at_the_end_of_a_part_of_the_grid_is_named(rates, best, said):
    rows = []
    for lr in rates:
        config = presets.preset("digits", "fedavg", scale="tiny", rounds=2, lr=lr, validation=0.1)
        run = stored(config, [0.5, 0.9 if lr == best else 0.8])
        for record in run.records:
            record["validation_accuracy"] = record["test_accuracy"]
        rows.append(PaperRow("grid", 0.2, f"fedavg lr={lr:g}", "FedAvg", config, (0,), {0: run}))
    notes = tables.grid(PaperStudy("digits", "tiny", "", rows), 0.2).notes
    assert [note for note in notes if note.startswith("Best on validation at")] == ([said] if said else [])
    assert f"rates: {', '.join(f'{lr:g}' for lr in rates)}. Best on test" in notes[0]


def test_the_grids_table_shows_both_choices():
    rows = []
    for lr, test, validation in ((1.0, 0.9, 0.3), (0.1, 0.6, 0.8)):
        config = presets.preset("digits", "fedavg", scale="tiny", rounds=2, lr=lr, validation=0.1)
        run = stored(config, [0.1, test])
        for record in run.records:
            record["validation_accuracy"] = validation
        rows.append(PaperRow("grid", 0.2, f"fedavg lr={lr:g}", "FedAvg", config, (0,), {0: run}))
    (line,) = tables.grid(PaperStudy("digits", "tiny", "", rows), 0.2).rows
    # Validation is the same in both rounds, so the first is chosen, and its test accuracy stands there.
    assert line == ["FedAvg", "2", "2", "0", "lr 1", "90.00", "lr 0.1", "10.00"]
