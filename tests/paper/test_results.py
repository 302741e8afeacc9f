"""From a spec to a folder of results: nothing is run twice, what is missing is said, records are enough."""

import os

import numpy as np
import pytest
from PIL import Image

from feddpc.errors import DataError
from feddpc.paper import documents, planned_rows, records, reproduction, tables
from feddpc.paper.study import all_runs
from feddpc.paper.study_spec import PaperSpec
from feddpc.paper.tuned import Tuned
from feddpc.runs.stop import Stop
from feddpc.runs.stored import load

#: Two methods, two rounds, two settings.
SMALL = {"alphas": (0.2,), "seeds": (0, 1), "changes": {"rounds": 2}, "rows": ("feddpc", "fedavg"), "rates": (0.3, 0.1)}
SMALL |= {"ladder_seeds": (0,)}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A grid and its Table 2, run once for all tests here."""
    spec = PaperSpec("digits", "tiny", **SMALL)
    folders = reproduction.Folders.of(tmp_path_factory.mktemp("out"), spec)
    return spec, folders, reproduction.reproduce(spec, ("table2",), folders, ladder=True)


def run_folders(folders):
    return sorted(p.name for p in (folders.runs / "items").iterdir())


def test_a_grid_and_then_the_table_with_its_winners(done):
    spec, folders, report = done
    assert report.missing == []
    assert report.parts == ("grid", "table2")
    tried = len(report.study.part("grid"))
    assert tried >= 4  # two methods at two rates, and the neighbours of the winners
    assert len(run_folders(folders)) == tried + 4  # two methods with two seeds
    tuned = Tuned.read(folders.base / "tuned.json")
    assert tuned.source == spec.ladder_words
    for row in report.study.part("table2"):
        best = tuned.settings[0.2][row.name]["validation"]
        mine = [r for r in report.study.part("grid") if r.config.method == row.name and r.config.rounds == 2]
        grid = {r.config.lr: r.estimate("validation").mean for r in mine}
        assert best.lr == row.config.lr == max(grid, key=grid.get)
        assert all(run.config.validation == 0 for run in row.runs.values())  # the table's runs train on everything
    assert all(path.is_file() for path in report.paths)
    written = {path.name for path in folders.results.iterdir()}
    assert {
        "results.md",
        "records.json",
        "report.html",
        "table2-alpha0.2.csv",
        "grid-alpha0.2.csv",
        "curves.png",
    } <= written
    page = (folders.results / "report.html").read_text()
    assert "This is a shortened version of the paper" in page
    assert "shortened: 2 of the paper's 400 rounds" in (folders.results / "results.md").read_text()


def test_a_later_ladder_takes_the_place_of_the_former(tmp_path):
    """And what was found by which ladder is told."""
    folders = reproduction.Folders(tmp_path, tmp_path / "results")
    changes = {"alphas": (0.2,), "seeds": (0,), "changes": {"rounds": 2}, "rows": ("feddpc", "fedavg")}
    changes |= {"ladder_seeds": (0,), "select": "test"}
    first = PaperSpec("digits", "tiny", **changes, rates=(0.3, 0.1))
    before = reproduction.reproduce(first, ("table2",), folders, ladder=True).study.part("grid")
    then = PaperSpec("digits", "tiny", **changes | {"rows": ("feddpc",)}, rates=(0.01,))
    report = reproduction.reproduce(then, ("table2",), folders, ladder=True)
    rows = {row.name for row in report.study.part("grid")}
    assert {row.name for row in before if row.config.method == "fedavg"} < rows
    assert {name for name in rows if name.startswith("feddpc")} == {"feddpc lr=0.01"}
    told = Tuned.read(folders.base / "tuned.json").source
    assert told == f"{then.ladder_words}; for others, {first.ladder_words}"
    reproduction.reproduce(then, ("table2",), folders, ladder=True)
    assert Tuned.read(folders.base / "tuned.json").source == told


def test_nothing_is_run_twice(done):
    spec, folders, report = done
    before = run_folders(folders)
    again = reproduction.reproduce(spec, ("table2",), folders, ladder=True)
    assert run_folders(folders) == before
    assert records.dumps(again.study) == records.dumps(report.study)


def test_what_is_missing_is_reported_and_run_when_asked(done, tmp_path):
    _, folders, _ = done
    wider = PaperSpec("digits", "tiny", **SMALL | {"seeds": (0, 1, 2)})
    elsewhere = reproduction.Folders(folders.base, tmp_path)
    report = reproduction.reproduce(wider, ("table2",), elsewhere, report_only=True)
    assert [(o.spec.name, o.status) for o in report.missing] == [
        ("FedDPC seed 2", "missing"),
        ("FedAvg seed 2", "missing"),
    ]
    assert "Missing: FedDPC (seed 2); FedAvg (seed 2)." in (tmp_path / "results.md").read_text()
    assert "2 runs are missing." in (tmp_path / "report.html").read_text()
    assert [len(row.runs) for row in report.study.part("table2")] == [2, 2]


def test_an_unfinished_grid_chooses_nothing(done, tmp_path):
    spec, _, _ = done
    folders = reproduction.Folders.of(tmp_path, spec)
    report = reproduction.reproduce(spec, ("table2",), folders, report_only=True, ladder=True)
    assert report.parts == ("grid",)
    assert len(report.missing) == 4
    assert not (folders.base / "tuned.json").exists()


def test_a_wish_to_stop_is_obeyed_and_the_rest_is_missing(done, tmp_path):
    spec, _, _ = done
    stop = Stop()
    stop.wanted = True
    folders = reproduction.Folders.of(tmp_path, spec)
    report = reproduction.reproduce(spec, ("figure4",), folders, stop=stop)
    assert len(report.missing) == 8
    assert report.study.part("figure4")[0].runs == {}


def test_parts_are_kept_beside_each_other(done):
    _, folders, _ = done
    one_seed = PaperSpec("digits", "tiny", **SMALL | {"seeds": (0,)})
    report = reproduction.reproduce(one_seed, ("figure4",), folders)
    kept = records.read(folders.results / "records.json")
    assert {row.part for row in kept.rows} == {"grid", "table2", "figure4"}
    assert [len(row.runs) for row in kept.part("table2")] == [2, 2]
    assert [row.name for row in report.study.part("figure4")] == ["feddpc", "no scaling", "neither", "fedavg x2"]
    assert all(row.scores for row in report.study.part("figure4"))


def test_a_slim_picture_keeps_its_commonest_colours(tmp_path):
    """A line of its own colour beside a thousand shades must not become one of them: the legend would lie."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    pixels[:10], pixels[10:12], pixels[12:14] = (255, 255, 255), (0, 119, 187), (0, 153, 136)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    documents._reduce_colors(tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as slim:
        assert slim.mode == "P"
        after = np.asarray(slim.convert("RGB"))
    assert (after[:14] == pixels[:14]).all()
    assert np.abs(after.astype(int) - pixels).mean() < 25  # the shades are near


def test_the_document_is_made_from_records_alone(done, tmp_path):
    _, folders, _ = done
    (tmp_path / "r.json").write_bytes((folders.results / "records.json").read_bytes())
    study = records.read(tmp_path / "r.json")
    paths = documents.write([study], tmp_path / "docs" / "reproduction.md", tmp_path / "docs" / "images")
    (below,) = (path for path in paths if path.name == "reproduction-digits.md")
    main, text = paths[0].read_text(), below.read_text()
    for table in tables.of_part(study, "table2"):
        assert table.markdown() in text
    assert text.startswith("# Digits, shortened: 2 of the paper's 400 rounds")
    assert "Table 1, server costs" in (tmp_path / "docs" / "reproduction-costs.md").read_text()
    assert "reproduction-digits.md" in main
    assert "$" not in main + text  # everything was filled in
    for path in paths:
        if path.suffix != ".png":
            continue
        assert f"]({os.path.relpath(path, paths[0].parent)})" in text
    before = {path: path.read_bytes() for path in paths}
    again = documents.write([records.read(tmp_path / "r.json")], paths[0], tmp_path / "docs" / "images")
    assert {path: path.read_bytes() for path in again} == before


def test_missing_data_names_the_commands(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"`feddpc data get cifar10` and `feddpc data get cifar100` first"):
        reproduction.require_data(["cifar10", "cifar100"])
    reproduction.require_data(["digits"])


def test_each_run_is_read_once(done, monkeypatch):
    """What a reproduction adds to its rounds does not grow with the rows that share a run."""
    spec, folders, _ = done
    read = []
    monkeypatch.setattr(reproduction, "load", lambda path: read.append(path) or load(path))
    lines = planned_rows.table2(spec, Tuned.read(folders.base / "tuned.json"))
    rows, _, _ = reproduction.collect([*lines, *lines, *lines], folders, report_only=True)
    assert len(read) == len(set(read)) == len(all_runs(rows)) == 4


def test_a_setting_that_cannot_be_run_does_not_stop_the_choice(done, tmp_path, monkeypatch):
    """Failed is not missing: it is named, and the winners are chosen among the others."""
    from feddpc.study import workers

    spec, _, _ = done
    folders, plain = reproduction.Folders.of(tmp_path, spec), workers.execute

    def execute(setting, **how):
        if setting.config.lr == 0.3 and setting.config.method == "feddpc":
            raise RuntimeError("no room")
        return plain(setting, **how)

    monkeypatch.setattr(workers, "execute", execute)
    report = reproduction.reproduce(spec, (), folders, ladder=True)
    assert [(o.spec.config.lr, o.status) for o in report.missing] == [(0.3, "failed")]
    assert Tuned.read(folders.base / "tuned.json").settings[0.2]["feddpc"]["test"].lr != 0.3


def test_a_page_or_figure_that_cannot_be_made_is_listed_and_the_rest_is_there(done, tmp_path, monkeypatch):
    spec, _, report = done

    def broken(*_, **__):
        raise ValueError("nothing to draw with")

    monkeypatch.setattr(reproduction.figures, "draw_all", broken)
    monkeypatch.setattr(reproduction, "write_page", broken)
    folders, failures = reproduction.Folders.of(tmp_path, spec), []
    paths = reproduction.write_results(report.study, ("table2",), folders, failures)
    assert [path.name for path in paths] == ["results.md", "records.json"]
    assert all(path.is_file() for path in paths)
    assert [text.partition(" ")[0] for text in failures] == ["figures", "report.html"]
    with pytest.raises(ValueError, match="nothing to draw with"):
        reproduction.write_results(report.study, ("table2",), folders)
