"""The compact file: it gives back what tables, figures and findings are made of, and stays small."""

import dataclasses
import json
import math

import numpy as np
import pytest

from feddpc.errors import RunFolderError
from feddpc.paper import documents, presets, records, tables
from feddpc.paper.claims import findings
from feddpc.paper.study import PaperRow, PaperStudy, all_runs, joined
from made_up import row, stored


def test_tables_and_findings_are_the_same_from_the_file(study, tmp_path):
    records.write(study, tmp_path / "r.json")
    back = records.read(tmp_path / "r.json")
    assert (back.data, back.scale, back.short, back.origin) == (study.data, study.scale, study.short, study.origin)
    for part in documents.PARTS:
        assert tables.of_part(back, part) == tables.of_part(study, part)
    assert findings(back) == findings(study)


def test_seconds_a_round_are_those_without_the_first(tmp_path):
    config = presets.preset("digits", scale="tiny", rounds=3)
    run = stored(config, [0.1, 0.2, 0.3])
    run.records[0]["seconds"] = 60.0  # compiled in it
    rows = [PaperRow("table2", 0.2, "feddpc", "FedDPC", config, (0,), {0: run})]
    records.write(PaperStudy("digits", "tiny", "", rows), tmp_path / "r.json")
    (back,) = records.read(tmp_path / "r.json").rows
    assert back.values("seconds") == rows[0].values("seconds") == {0: 0.5}


def test_writing_again_changes_nothing(study, tmp_path):
    records.write(study, tmp_path / "r.json")
    assert records.dumps(records.read(tmp_path / "r.json")) == (tmp_path / "r.json").read_text()


def test_values_are_rounded_and_what_is_missing_stays_missing(tmp_path):
    config = presets.preset("digits", scale="tiny", rounds=3)
    run = stored(config, [0.1234567, None, 0.3], loss=[1.23456, 2.0, 3e-7], mean_scale=2.123456, mean_cosine=None)
    rows = [PaperRow("table2", 0.2, "feddpc", "FedDPC", config, (0, 1), {0: run})]
    records.write(PaperStudy("digits", "tiny", "", rows), tmp_path / "r.json")
    (back,) = records.read(tmp_path / "r.json").rows
    assert back.missing == [1]
    assert [r["test_accuracy"] for r in back.runs[0].records] == [0.12346, None, 0.3]
    assert [r["train_loss"] for r in back.runs[0].records] == [1.235, 1.0, 1.0]  # a block of its own, and one of two
    assert {r["mean_scale"] for r in back.runs[0].records} == {2.123}
    assert back.values("seconds") == {0: 0.5}
    assert back.values("cosine") == {}
    assert back.runs[0].config == config


def test_accuracies_on_the_test_set_are_exact(tmp_path):
    """On 359 digits differences are multiples of 1/359; rounded, equal ones would no longer be equal to a test."""
    config = presets.preset("digits", scale="tiny", rounds=4)
    accuracy = [80 / 359, None, 0.0, 1.0]
    rows = [PaperRow("table2", 0.2, "feddpc", "FedDPC", config, (0,), {0: stored(config, accuracy)})]
    records.write(PaperStudy("digits", "tiny", "", rows), tmp_path / "r.json")
    (back,) = records.read(tmp_path / "r.json").rows
    assert [r["test_accuracy"] for r in back.runs[0].records] == accuracy
    lost = stored(config, [None] * 4)
    records.write(PaperStudy("digits", "tiny", "", [dataclasses.replace(rows[0], runs={0: lost})]), tmp_path / "r.json")
    assert len(records.read(tmp_path / "r.json").rows[0].runs[0].records) == 4


def test_how_a_run_ended_is_kept(tmp_path):
    rows = [row("table2", "feddpc", [0.5], status="diverged")]
    records.write(PaperStudy("digits", "tiny", "", rows), tmp_path / "r.json")
    assert records.read(tmp_path / "r.json").rows[0].diverged == [0]


def test_a_run_that_serves_several_rows_is_stored_once(study, tmp_path):
    shared = study.rows[0]
    twin = dataclasses.replace(shared, part="figure4")
    records.write(PaperStudy("digits", "tiny", "", [shared, twin]), tmp_path / "r.json")
    assert len(json.loads((tmp_path / "r.json").read_text())["runs"]) == len(shared.runs)
    a, b = records.read(tmp_path / "r.json").rows
    assert a.runs[0] is b.runs[0]
    # Also where one of the two was read from such a file, as when one part is asked for anew.
    records.write(PaperStudy("digits", "tiny", "", [shared, b]), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "r.json").read_text()


def test_runs_that_came_out_alike_stay_apart(tmp_path):
    rows = [row("table2", name, [0.5]) for name in ("fedprox", "fedavg")]
    records.write(PaperStudy("digits", "tiny", "", rows), tmp_path / "r.json")
    back = records.read(tmp_path / "r.json")
    assert [r.runs[0].config.method for r in back.rows] == ["fedprox", "fedavg"]


def test_a_ladder_of_cifar10_and_its_table_fit_into_a_third_of_a_megabyte(tmp_path):
    """200 settings and 100 runs of 400 rounds; of a setting the rounds that choose are kept, so all choices stay."""
    rng = np.random.default_rng(0)
    config, rows = presets.preset("cifar10", "fedprox", validation=0.1), []
    for i in range(300):
        run = stored(config, rng.integers(0, 10_000, 400) / 10_000, loss=rng.random(400))
        if i < 200:
            for record, value in zip(run.records, rng.integers(0, 5_000, 400) / 5_000, strict=True):
                record["validation_accuracy"] = value
        about = ("grid", 0.2, f"fedprox lr={i}") if i < 200 else ("table2", 0.2, f"row {i}")
        rows.append(PaperRow(*about, "FedProx", config, (0,), {0: run}))
    text = records.dumps(PaperStudy("cifar10", "paper", "", rows))
    assert len(text) < 333_000
    (path := tmp_path / "r.json").write_text(text)
    keys = ("best", "best_round", "validation", "validated")
    for before, after in zip(rows[:200], records.read(path).rows, strict=False):
        assert {k: before.scores[0][k] for k in keys} == pytest.approx({k: after.scores[0][k] for k in keys}, abs=1e-5)


@pytest.mark.parametrize(
    "change", [{"rounds": 10**12}, {"rounds": 3}, {"correct": "%%"}, {"correct": "AAA="}, {"train_loss": [1]}]
)
def test_a_run_that_makes_no_sense_is_refused(tmp_path, change):
    records.write(PaperStudy("digits", "tiny", "", [row("table2", "feddpc", [0.5], rounds=9)]), tmp_path / "r.json")
    table = json.loads((tmp_path / "r.json").read_text())
    table["runs"][0] |= change
    (tmp_path / "r.json").write_text(json.dumps(table))
    with pytest.raises(RunFolderError, match="holds no records"):
        records.read(tmp_path / "r.json")


def test_means_over_rounds_stay(tmp_path):
    """Loss, factor and cosine are kept as means over blocks: the mean of all rounds is that of the blocks."""
    config, rng = presets.preset("digits", rounds=61), np.random.default_rng(0)
    run = stored(config, [0.5] * 61, loss=rng.random(61))
    for record, cosine, scale in zip(run.records, rng.normal(size=61), 2 + rng.random(61), strict=True):
        record |= {"mean_cosine": cosine, "mean_scale": scale}
    rows = [PaperRow("table2", 0.2, "feddpc", "FedDPC", config, (0,), {0: run})]
    records.write(PaperStudy("digits", "small", "", rows), tmp_path / "r.json")
    (after,) = records.read(tmp_path / "r.json").rows
    for measure in ("loss", "scale", "cosine"):
        assert after.scores[0][measure] == pytest.approx(rows[0].scores[0][measure], abs=3e-4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}], "shared": {}}'])
def test_a_foreign_file_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"r\.json"):
        records.read(tmp_path / "r.json")
    with pytest.raises(RunFolderError, match="there is no file"):
        records.read(tmp_path / "absent.json")


def test_files_of_one_study_are_put_together(study, whole, tmp_path):
    parts = {"a": study.part("table2"), "b": study.part("figure4"), "c": study.part("table2")[:1]}
    for name, rows in parts.items():
        records.write(dataclasses.replace(study, rows=rows, origin={name: 1}), tmp_path / f"{name}.json")
    records.write(whole, tmp_path / "whole.json")
    first, second = records.read_all([tmp_path / f"{name}.json" for name in ("a", "b", "c", "whole")])
    assert (first.data, second.data) == ("cifar10", "digits")  # in the order of the presets
    names = [(row.part, row.alpha, row.name) for row in second.rows]
    assert names == [(r.part, r.alpha, r.name) for r in (*parts["a"], *parts["b"])]
    assert second.origin == {"a": 1, "b": 1, "c": 1}


def test_the_time_of_all_calls_is_added_up_and_told(study):
    first, then = (dataclasses.replace(study, origin={"machine": {"torch": "2.0"}, "spent": s}) for s in (30.0, 60.5))
    both = joined(first, then)
    assert both.origin["spent"] == 90.5
    runs = all_runs(both.rows)
    told = f"{len(runs)} runs with {sum(len(r.records) for r in runs):,} rounds took 1.5 minutes."
    assert told in documents.section(both, ["table2"], {})
    packed = dataclasses.replace(both, origin={**both.origin, "at_once": 4})
    assert "took 1.5 minutes, 4 at a time: alone, a round takes less" in documents.section(packed, ["table2"], {})
    assert "took" not in documents.section(study, ["table2"], {})
    assert "spent" not in joined(study, then).origin  # how long the first one took nobody knows
    other = dataclasses.replace(then, origin={"machine": {"torch": "2.0", "engine": "loop"}})
    assert joined(first, other).origin["machine"] == {"torch": "2.0"}


@pytest.mark.parametrize("spent", [-5, math.nan, math.inf, "soon", None])
def test_a_time_that_is_none_is_refused(study, tmp_path, spent):
    records.write(dataclasses.replace(study, origin={"spent": spent}), tmp_path / "r.json")
    with pytest.raises(RunFolderError, match=r"r\.json"):
        records.read(tmp_path / "r.json")


def test_beside_our_time_stands_that_of_the_papers_rounds(whole):
    told = documents.section(dataclasses.replace(whole, origin={"machine": {"torch": "2.0"}, "spent": 60}), [], {})
    assert "The 4,800 rounds of the paper's 12 cells take 39.6 minutes at its seconds per round." in told


def test_the_time_of_all_studies_stands_beside_that_of_the_paper(whole, study):
    about = {"machine": {"device": "a GPU"}, "spent": 60}
    short = dataclasses.replace(whole, data="tiny-imagenet", short="4 of 800 rounds", origin=about | {"spent": 6000.0})
    told = documents.render([dataclasses.replace(whole, origin=about), short, study], "images")
    ours, theirs = "runs on CIFAR-10, Tiny ImageNet (4 of 800 rounds) took 1.7 hours", 2376 + 16304
    runs = 2 * len(all_runs(whole.rows))
    assert f"* Time: {runs} {ours}, tuning and controls included (device: a GPU)" in told
    assert f"the rounds of the paper's 24 cells take {theirs / 3600:.1f} hours" in told
    assert "* Time:" not in documents.render([study], "images")  # nobody noted how long it took


def test_an_empty_study_can_be_kept(tmp_path):
    records.write(PaperStudy("digits", "tiny", "short"), tmp_path / "r.json")
    assert records.read(tmp_path / "r.json") == PaperStudy("digits", "tiny", "short")


def test_the_machine_is_what_all_runs_agree_on():
    a, b = row("table2", "feddpc", [0.5, 0.6]).runs.values()
    other = dataclasses.replace(b, environment={**b.environment, "device": "cuda"})
    how = {"engine": "loop", "precision": "float32"}
    assert records.machine([a, b]) == {"torch": "2.0", "cores": 2, "device": "cpu", **how}
    assert records.machine([a, other]) == {"torch": "2.0", "cores": 2, **how}


def test_the_page_begins_with_both_orders(study):
    text = documents.pages([study], "images")["reproduction-digits.md"]
    rows = {r.label: r.estimate("best").mean for r in study.part("table2", 0.2)}
    ours = " > ".join(f"{name} {100 * rows[name]:.1f}" for name in sorted(rows, key=lambda name: -rows[name]))
    theirs = "FedDPC 55.4 > FedCM 52.1 > FedExP 49.5 > FedVARP 49.1 > FedGA 48.7 > FedProx 45.2"
    assert f"alpha 0.2: {ours}; the paper on CIFAR-10: {theirs}." in text
