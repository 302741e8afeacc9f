"""Rows are means and spreads over seeds, grouped and named by what sets them apart."""

import csv
import io
import json
import math
import sys

import pytest
from rich.console import Console

from feddpc.cli import main
from feddpc.errors import RunFolderError
from feddpc.report.tables import as_csv, as_dicts, collect, headings, rich_table, rows


def line(first, step, rounds):
    return [first + step * t for t in range(rounds)]


def test_numbers_of_two_seeds_are_the_closed_forms(make_run):
    # 20 rounds up to 0.20; 20 rounds down from 0.40: best at rounds 20 and 1, last ten around 0.155 and 0.255
    up, down = line(0.01, 0.01, 20), line(0.40, -0.01, 20)
    (row,) = rows([make_run(accuracy=up, seed=3), make_run(accuracy=down, seed=7)])
    assert (row.label, row.seeds, row.rounds, row.notes, row.leads) == ("fedavg", [3, 7], [20, 20], [], True)
    assert row.best == pytest.approx((0.20 + 0.40) / 2)
    assert row.best_spread == pytest.approx(0.20 / math.sqrt(2))  # |a - b| / sqrt(2) is the sample deviation of two
    assert row.best_round == 10  # of 20 and 1, the mean is 10.5, and half goes to the even side
    assert row.last10 == pytest.approx((0.155 + 0.255) / 2)
    assert row.last10_spread == pytest.approx(0.10 / math.sqrt(2))
    assert row.final == pytest.approx((0.20 + 0.21) / 2)
    assert row.seconds_per_round == pytest.approx(0.5 * 22 / 2)  # of rounds 2 to 20


def test_one_seed_has_no_spread_and_a_short_run_averages_what_it_has(make_run):
    (row,) = rows([make_run(accuracy=[0.1, 0.4, 0.1])])
    assert (row.best_spread, row.last10_spread, row.best_round) == (None, None, 2)
    assert row.last10 == pytest.approx(0.2)


def test_rounds_without_accuracy_are_left_out(make_run):
    silent = make_run(accuracy=[None, None], seed=1)
    (row,) = rows([make_run(accuracy=[0.2, None]), silent])
    assert (row.best, row.best_spread, row.final) == (0.2, None, 0.2)
    assert row.notes == ["no test accuracy in 1 of 2 seeds"]
    (row,) = rows([silent])
    assert (row.best, row.best_round, row.last10, row.leads) == (None, None, None, False)


def test_labels_show_what_differs_and_nothing_else(make_run):
    def labels(*runs):
        return [row.label for row in rows(runs)]

    one, zero = {"lam": 1.0, "tau": 1e-6}, {"lam": 0.0, "tau": 1e-6}
    avg = make_run("fedavg")
    assert labels(make_run("feddpc", hyper=one), avg) == ["feddpc", "fedavg"]
    assert labels(make_run("feddpc", hyper=one), avg, make_run("feddpc", hyper=zero)) == [
        "feddpc lam=1",
        "fedavg",
        "feddpc lam=0",
    ]
    assert labels(avg, make_run("fedavg", alpha=0.6)) == ["fedavg alpha=0.2", "fedavg alpha=0.6"]
    dealt = [
        make_run("fedcm", alpha=a, partition_options={"alpha": a}, lr=0.3, server_lr=s)
        for a in (0.2, 0.6)
        for s in (0.3, 0.6)
    ]
    said = [f"fedcm partition.alpha={a}{step}" for a in (0.2, 0.6) for step in ("", " server_lr=0.6")]
    assert labels(*dealt) == said
    deep = make_run("fedavg", model_options={"depth": 3})
    assert labels(avg, deep) == ["fedavg", "fedavg model.depth=3"]
    # another method's hyper-parameters are no difference between configurations of one method
    assert labels(make_run("fedprox", hyper={"mu": 0.1}), avg) == ["fedprox", "fedavg"]


def test_groups_keep_the_order_of_first_appearance_and_the_best_is_marked(make_run):
    runs = [make_run(m, [a], seed=s) for s in (0, 1) for m, a in (("fedcm", 0.3), ("fedavg", 0.5), ("fedexp", 0.5))]
    table = rows(runs)
    assert [(r.label, r.seeds, r.leads) for r in table] == [
        ("fedcm", [0, 1], False),
        ("fedavg", [0, 1], True),
        ("fedexp", [0, 1], True),
    ]
    assert rows([]) == []


def test_engine_and_device_part_runs_only_where_a_seed_would_count_twice(make_run):
    (row,) = rows([make_run(seed=0, engine="loop"), make_run(seed=1, engine="stacked")])
    assert (row.label, row.seeds) == ("fedavg", [0, 1])
    apart = rows([make_run(engine="loop"), make_run(engine="stacked")])
    assert [r.label for r in apart] == ["fedavg engine=loop", "fedavg engine=stacked"]
    (row,) = rows([make_run(accuracy=[0.5]), make_run(accuracy=[0.5])])
    assert row.notes == ["seed 0 counts 2 times"]


@pytest.mark.parametrize(
    ("status", "note"),
    [
        ("finished", []),
        ("diverged", ["diverged"]),
        ("interrupted", ["interrupted: 2 of 30 rounds"]),
        (None, ["unfinished: 2 of 30 rounds"]),
    ],
)
def test_a_run_that_did_not_finish_is_noted(make_run, status, note):
    rounds = 2 if status == "finished" else 30
    run = make_run(accuracy=[0.1, 0.2], status=status, rounds=rounds)
    assert rows([run])[0].notes == note


def test_notes_count_the_seeds(make_run):
    runs = [make_run(accuracy=[0.1] * 3, seed=0, rounds=3), make_run(status="diverged", seed=1, rounds=3)]
    runs += [make_run(status=None, seed=2, rounds=3), make_run(accuracy=[0.1] * 2, status=None, seed=3, rounds=3)]
    assert rows(runs)[0].notes == ["diverged in 1 of 4 seeds", "unfinished in 2 of 4 seeds: 1 to 2 of 3 rounds"]


def test_an_old_summary_of_a_resumed_run_is_not_believed(make_run):
    run = make_run(accuracy=[0.1, 0.3], status="interrupted", rounds=5)
    run.records.append(dict(run.records[-1], round=3, test_accuracy=0.6))
    (row,) = rows([run])
    assert (row.best, row.notes) == (0.6, ["unfinished: 3 of 5 rounds"])
    longer = make_run(accuracy=[0.1, 0.3], status="finished", rounds=5)
    assert rows([longer])[0].notes == ["unfinished: 2 of 5 rounds"]


def test_garbled_records_name_the_file(make_run):
    run = make_run()
    del run.records[0]["seconds"]
    with pytest.raises(RunFolderError, match=r"fedavg-seed0.rounds\.jsonl.*'seconds'"):
        rows([run])


def shown(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_terminal_table_has_percent_bold_best_and_notes_only_if_any(make_run):
    plain = [make_run("fedavg", [0.541], seed=0), make_run("fedavg", [0.547], seed=1), make_run("fedcm", [0.2], seed=0)]
    table = rich_table(rows(plain))
    text = shown(table)
    assert "54.40 ± 0.42" in text
    assert "20.00" in text
    assert "notes" not in text
    bold = [["bold" in str(cell.style) for cell in column._cells] for column in table.columns]
    assert all(column == [True, False] for column in bold)  # the best row
    text = shown(rich_table(rows([*plain, make_run("[red]x[/]", status="diverged")])))
    assert "notes" in text
    assert "[red]x[/]" in text


def test_terminal_table_shows_every_column_at_80(make_run):
    runs = [make_run("feddpc", [0.5 + seed / 10], seed=seed, status=None, rounds=9) for seed in range(3)]
    console = Console(width=80, file=io.StringIO())
    console.print(rich_table(rows(runs)))
    words = console.file.getvalue().split()
    wanted = {word for heading in headings(rows(runs)) for word in heading.split()}
    assert wanted | {"notes", "feddpc", "unfinished"} <= set(words)


def test_csv_and_dicts_carry_full_precision(make_run):
    table = rows([make_run('od"d, name', [1 / 3], seed=0, status="diverged"), make_run('od"d, name', [2 / 3], seed=1)])
    (line,) = csv.DictReader(io.StringIO(as_csv(table)))
    assert line["label"] == 'od"d, name'
    assert float(line["best_accuracy"]) == table[0].best == 0.5
    assert (line["seeds"], line["rounds"], line["best"]) == ("0 1", "1 1", "true")
    assert (line["best_spread"], line["notes"]) == (repr(table[0].best_spread), "diverged in 1 of 2 seeds")
    assert json.loads(json.dumps(as_dicts(table))) == as_dicts(table)
    assert as_dicts(table)[0]["seeds"] == [0, 1]


def test_collect_finds_runs_at_any_depth_in_the_order_of_compare_json(tmp_path, make_run, store):
    for name in ("b", "a", "deep/d", "deep/c"):
        store(make_run(folder=tmp_path / name))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)

    def names(folder):
        return [run.folder.relative_to(tmp_path).as_posix() for run in collect(folder)]

    assert names(tmp_path) == ["a", "b", "deep/c", "deep/d"]
    assert names(tmp_path / "a") == ["a"]
    (tmp_path / "compare.json").write_text('{"runs": ["deep", "not-yet", "b"]}')
    (tmp_path / "deep" / "compare.json").write_text('{"runs": ["d"]}')
    assert names(tmp_path) == ["deep/d", "deep/c", "b", "a"]


def test_collect_says_what_is_wrong(tmp_path, make_run, store):
    with pytest.raises(RunFolderError, match=f"{tmp_path.name} holds no run"):
        collect(tmp_path)
    with pytest.raises(RunFolderError, match=r"there is no folder .*missing"):
        collect(tmp_path / "missing")
    store(make_run(folder=tmp_path / "a"))
    for text in ('{"runs": 3}', '["a"]', "{", '{"order": []}'):
        (tmp_path / "compare.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"compare\.json cannot be read"):
            collect(tmp_path)


@pytest.fixture
def partly_broken(tmp_path, make_run, store):
    """A comparison of six runs: one is whole, one not begun, and in each of the others something is broken."""
    names = ["whole", "not-begun", "config", "line", "field", "environment"]
    for name in names:
        if name != "not-begun":
            store(make_run(accuracy=[0.1, 0.2, 0.3], folder=tmp_path / name, seed=names.index(name)))
    (tmp_path / "compare.json").write_text(json.dumps({"runs": names}))
    (tmp_path / "config" / "config.toml").write_text("no = toml = at all")
    lines = (tmp_path / "line" / "rounds.jsonl").read_text().splitlines()
    (tmp_path / "line" / "rounds.jsonl").write_text("\n".join([lines[0], "{garbled", lines[2]]) + "\n")
    lines = [
        json.dumps({k: v for k, v in json.loads(text).items() if k != "seconds" or i < 2})
        for i, text in enumerate(lines)
    ]
    (tmp_path / "field" / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "environment" / "environment.json").write_text("[]")
    return tmp_path


def test_collect_leaves_out_what_is_broken_and_says_so(partly_broken):
    damage = []
    found = {run.folder.name: len(run.records) for run in collect(partly_broken, damage)}
    assert found == {"whole": 3, "line": 1, "field": 2, "environment": 3}
    assert len(damage) == 5
    for said in (
        "not-begun has not begun",
        "config is no run folder of this program",
        "line/rounds.jsonl, line 2: ",
        "field/rounds.jsonl, line 3: accuracy or seconds are missing",
        "environment/environment.json cannot be read: it holds no table",
    ):
        assert [text for text in damage if text.startswith(said)], said
    assert str(partly_broken) not in "".join(damage)
    with pytest.raises(RunFolderError):
        collect(partly_broken)


def test_collect_needs_something_that_can_be_read(partly_broken):
    for name in ("whole", "line", "field", "environment"):
        (partly_broken / name / "config.toml").write_text("=")
    with pytest.raises(RunFolderError, match="holds no run that can be read"):
        collect(partly_broken, [])
    with pytest.raises(RunFolderError, match="no run folder of this program"):
        collect(partly_broken / "config", [])
    (partly_broken / "compare.json").write_text("{")
    damage = []
    with pytest.raises(RunFolderError):
        collect(partly_broken, damage)
    assert any("compare.json cannot be read" in text for text in damage)


def test_the_command_reports_what_it_can_and_what_is_missing(partly_broken, monkeypatch, capsys):
    def report(*flags):
        monkeypatch.setattr(sys, "argv", ["feddpc", "report", str(partly_broken), *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    code, out, err = report()
    assert (code, err.count("missing: ")) == (0, 5)
    assert "report.html" in out
    page = (partly_broken / "report.html").read_text()
    assert "<li>not-begun has not begun</li>" in page
    code, out, err = report("--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert len(found["missing"]) == 5
    assert found["table"][0]["rounds"] == [3, 1, 2, 3]
    assert report("--quiet") == (0, "", "")
