"""`feddpc sweep`: from grid to table, continued, refused, unfinished, merged."""

import io
import json
import re
import shutil
import signal
import sys
import time

import pytest
from rich.console import Console

from feddpc.cli import main
from feddpc.report.display import Many
from feddpc.runs.record import read_records
from feddpc.study import Progress, workers

SMALL = ["--clients", "10", "--cohort", "3", "--model", "mlp", "--engine", "loop", "--rounds", "4", "--device", "cpu"]
GRID = ["--methods", "feddpc,fedavg", "--grid", "lr=0.3,0.1", "--grid", "feddpc.lam=0.5,1"]


@pytest.fixture
def feddpc(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["feddpc", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        return out if code != 2 else err

    return call


@pytest.mark.parametrize(
    ("wanted", "at_once"),
    [
        ([], 4),
        (["--data", "cifar10"], 4),
        (["--data", "cifar100"], 1),  # whose model is ResNet18 if none is named
        (["--data", "cifar100", "--model", "lenet5"], 4),
        (["--model", "resnet18"], 1),
        (["--grid", "model=mlp,resnet18"], 1),
        (["--grid", "model=mlp,cnn"], 4),
        (["--grid", "model=[8],[16]"], 4),  # no model, which the runs will say
        (["--data", "some/folder"], 1),  # who knows
        (["--model", "resnet18", "--at-once", "3"], 3),
        (["--set", "device=cpu"], 1),
    ],
)
def test_a_large_model_has_the_gpu_for_itself(monkeypatch, feddpc, wanted, at_once):
    monkeypatch.setattr("feddpc.resolve.resolve_device", lambda name: "cuda" if name == "auto" else name)
    seen = []
    monkeypatch.setattr("feddpc.study.run_sweep", lambda plan, out, workers, **_: seen.append(workers.at_once) or [])
    given = wanted if "--grid" in wanted else [*wanted, "--grid", "lr=0.1"]
    feddpc("sweep", *given, "-q", "--out", "S", code=1)  # nothing was run, so nothing can be chosen
    assert seen == [at_once]


def rows(text):
    """Method, way of choosing and setting of every line of the table."""
    return re.findall(r"^(\w+) +(validation|test) +((?:\w+=\S+ ?)+|defaults|nothing can be chosen)", text, re.M)


def test_from_grid_to_table(feddpc, tmp_path):
    text = feddpc("sweep", *GRID, *SMALL, "--seeds", "0,1", "--out", "S")
    assert "feddpc: 4 settings x 2 seeds x 4 rounds" in text
    assert "fedavg: 2 settings x 2 seeds x 4 rounds" in text
    assert "warning: the methods have different budgets" in text
    assert "sweep  12/12 runs  round 48/48" in text
    assert [row[:2] for row in rows(text)] == [(m, by) for m in ("feddpc", "fedavg") for by in ("validation", "test")]
    assert "4x2x4" in text
    assert (tmp_path / "S" / "results.csv").read_text().count("\n") == 13
    chosen = json.loads((tmp_path / "S" / "chosen.json").read_text())
    assert [c["by"] for c in chosen] == ["validation", "validation", "test", "test"]
    again = feddpc("sweep", *GRID, *SMALL, "--seeds", "0,1", "--out", "S")
    assert rows(again) == rows(text)
    shown = feddpc("sweep", "show", "S")
    assert rows(shown) == rows(text)
    assert "12 done" in shown
    report = feddpc("report", "S")
    assert "feddpc lam=0.5" in report


def test_a_ladder_says_its_rungs_and_is_continued(feddpc, tmp_path):
    """The plan keeps that it is a ladder, over two seeds by default; every method tries as many settings."""
    text = feddpc("sweep", *GRID, *SMALL, "--ladder", "--out", "S")
    assert "ladder, in rounds: all settings 1, those above chance 1, the best 4" in text
    assert "feddpc: 4 settings, then" in text
    assert "fedavg: 4 settings, then" in text
    assert "warning: the methods have different budgets" not in text
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "S" / "items").glob("*/rounds.jsonl")}
    again = feddpc("sweep", "--out", "S")
    assert rows(again) == rows(text)
    assert {p: p.stat().st_mtime_ns for p in files} == files
    assert rows(feddpc("sweep", "show", "S")) == rows(text)
    shutil.rmtree(tmp_path / "S")
    feddpc("sweep", *GRID, *SMALL, "--out", "S")
    assert "ladder = True, was None" in feddpc("sweep", *GRID, *SMALL, "--ladder", "--out", "S", code=2)


def test_the_best_of_the_grid_is_chosen(feddpc, tmp_path):
    told = json.loads(feddpc("sweep", *GRID, *SMALL, "--out", "S", "--json"))
    assert told["runs"] == {"done": 6}
    results = [json.loads(line) for line in (tmp_path / "S" / "results.jsonl").read_text().splitlines()]
    for choice in told["table"]:
        mine = [r for r in results if r["method"] == choice["method"]]
        column = "validation_accuracy" if choice["by"] == "validation" else "best_accuracy"
        best = max(mine, key=lambda r: r[column])
        assert (choice["score"], choice["runs"]) == (best[column], [best["key"]])
        worth = "validated_accuracy" if choice["by"] == "validation" else "best_accuracy"
        assert choice["test_accuracy"] == best[worth]


def test_equal_budgets_need_no_warning(feddpc):
    args = ["--methods", "feddpc,fedavg", "--random", "lr=log:0.01:1", "--random", "lam=uniform:0:2", "--trials", "2"]
    assert "warning" not in feddpc("sweep", *args, *SMALL, "--out", "S")


def test_a_sampler_is_followed_and_continued(feddpc, tmp_path):
    args = ["--methods", "fedavg", "--random", "lr=log:0.001:1", "--trials", "7", "--sampler", "tpe", *SMALL]
    text = feddpc("sweep", *args, "--out", "S")
    assert "sweep  7/7 runs  round 28/28" in text
    before = (tmp_path / "S" / "results.jsonl").read_bytes()
    assert rows(feddpc("sweep", "--out", "S")) == rows(text)
    assert (tmp_path / "S" / "results.jsonl").read_bytes() == before
    assert rows(feddpc("sweep", "show", "S")) == rows(text)
    refused = feddpc("sweep", "--out", "S", "--select", "test", code=2)
    assert "objective = 'test', was 'validation'" in refused


def test_another_sweep_is_refused_and_told_what_differs(feddpc, tmp_path):
    feddpc("sweep", *GRID, *SMALL, "--out", "S", "--quiet")
    before = sorted(p.name for p in (tmp_path / "S" / "items").iterdir())
    said = feddpc("sweep", "--out", "S", "--rounds", "5", "--grid", "lr=0.3", "--set", "feddpc.tau=0.1", code=2)
    for part in ("rounds = 5, was 4", "grid = ['lr=0.3'], was", "feddpc.tau=0.1", "copy S/items"):
        assert part in said
    assert sorted(p.name for p in (tmp_path / "S" / "items").iterdir()) == before
    assert feddpc("sweep", "--out", "S", "--engine", "stacked", "--quiet") == ""  # how it is run may change


def test_a_sweep_is_extended_in_its_folder(feddpc, tmp_path):
    text = feddpc("sweep", "--methods", "fedavg", "--grid", "lr=0.1,0.3", *SMALL, "--out", "S")
    assert "warning: fedavg is best at the end of its grid (lr = " in text
    assert "lr at grid end" in text
    said = feddpc("sweep", "--out", "S", "--seeds", "0,1", code=2)
    assert "seeds = [0, 1], was [0]" in said
    assert "add --extend" in said
    text = feddpc("sweep", "--out", "S", "--extend", "--methods", "feddpc", "--grid", "lr=0.03", "--seeds", "1")
    assert "12 done" in text
    assert "3x2x4" in text
    chosen = json.loads((tmp_path / "S" / "chosen.json").read_text())
    assert [c["method"] for c in chosen] == ["fedavg", "feddpc"] * 2
    assert all(isinstance(c["grid_ends"], list) for c in chosen)
    labels = re.findall(r"^(fed\w+) lr=(\S+)", feddpc("report", "S"), re.M)
    assert labels == [(m, lr) for m in ("fedavg", "feddpc") for lr in ("0.1", "0.3", "0.03")]
    assert "no sweep to extend" in feddpc("sweep", "--extend", "--grid", "lr=0.1", "--out", "absent", code=2)


def test_an_unfinished_sweep_says_what_is_there_and_what_is_missing(feddpc, tmp_path):
    feddpc("sweep", *GRID, *SMALL, "--out", "S", "--quiet")
    results = [json.loads(line) for line in (tmp_path / "S" / "results.jsonl").read_text().splitlines()]
    for row in (r for r in results if r["settings"]["lr"] == 0.1):
        shutil.rmtree(tmp_path / "S" / row["path"])
    text = feddpc("sweep", "show", "S", code=3)
    assert "3 done, 3 missing" in text
    assert "missing: fedavg lr=0.1 seed 0" in text
    assert re.search(r"fedavg +validation +lr=0.3 .*1 missing", text)
    told = json.loads(feddpc("sweep", "show", "S", "--json", code=3))
    assert [m["label"] for m in told["missing"]] == [r["label"] for r in results if r["settings"]["lr"] == 0.1]
    feddpc("sweep", "--out", "S", "--quiet")
    again = [json.loads(line) for line in (tmp_path / "S" / "results.jsonl").read_text().splitlines()]
    same = ("key", "best_accuracy", "validation_accuracy", "validated_accuracy")
    assert [[r[k] for k in same] for r in again] == [[r[k] for k in same] for r in results]


def test_folders_of_two_machines_are_shown_as_one(feddpc, tmp_path):
    text = feddpc("sweep", *GRID, *SMALL, "--out", "A")
    (tmp_path / "B" / "items").mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "A" / "items").iterdir())):
        if number % 2:
            path.rename(tmp_path / "B" / "items" / path.name)
    assert "missing" in feddpc("sweep", "show", "A", code=3)
    assert rows(feddpc("sweep", "show", "A", "B")) == rows(text)
    feddpc("sweep", "show", "B")  # runs without a plan are shown as they are
    (tmp_path / "A" / "sweep.toml").rename(tmp_path / "B" / "sweep.toml")
    assert rows(feddpc("sweep", "show", "A", "B")) == rows(text)
    feddpc("sweep", "--methods", "fedcm", "--grid", "lr=0.1", *SMALL, "--out", "C", "--quiet")
    assert "different sweeps (methods = ['fedcm']" in feddpc("sweep", "show", "B", "C", code=2)


def test_a_failed_run_is_named_and_the_exit_code_says_so(feddpc, monkeypatch):
    plain = workers.execute

    def poisoned(setting, **how):
        if setting.config.lr == 0.1:
            raise ValueError("poison")
        return plain(setting, **how)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "execute", poisoned)
        text = feddpc("sweep", "--methods", "fedavg", "--grid", "lr=0.3,0.1", *SMALL, "--out", "S", code=3)
    assert "failed: fedavg lr=0.1 seed 0: ValueError: poison" in text
    assert "1 failed" in feddpc("sweep", "show", "S", code=3)
    assert "2 done" in feddpc("sweep", "--out", "S")


def test_diverged_runs_are_results(feddpc):
    args = ["sweep", "--methods", "fedprox", *SMALL]
    text = feddpc(*args, "--grid", "mu=1e30,0.1", "--out", "S")
    assert "1 diverged, 1 done" in text
    assert re.search(r"fedprox +validation +mu=0.1 .*1 diverged", text)
    assert "nothing can be chosen" in feddpc(*args, "--grid", "mu=1e30,2e30", "--out", "T", code=1)


def test_control_c_stops_after_the_round_and_the_sweep_goes_on_later(feddpc, monkeypatch, tmp_path):
    plain, seen = workers.execute, []

    def interrupted(setting, on_round, **how):
        def both(record):
            on_round(record)
            seen.append(record)
            if len(seen) == 6:
                signal.raise_signal(signal.SIGINT)

        return plain(setting, on_round=both, **how)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "execute", interrupted)
        text = feddpc("sweep", *GRID, *SMALL, "--out", "S", code=130)
    assert "1 done" in text
    assert "3 of 4 rounds" in text
    assert "6 done" in feddpc("sweep", "--out", "S")
    assert all(len(read_records(p)) == 4 for p in tmp_path.glob("S/items/*/rounds.jsonl"))


def test_processes_give_the_same_table(feddpc):
    here = feddpc("sweep", *GRID, *SMALL, "--out", "here")
    apart = feddpc("sweep", *GRID, *SMALL, "--out", "apart", "--processes", "2")
    assert rows(here) == rows(apart)


def test_without_validation_only_the_test_set_chooses(feddpc):
    text = feddpc("sweep", "--methods", "fedavg", "--grid", "lr=0.3,0.1", "--validation", "0", *SMALL, "--out", "S")
    assert [row[1] for row in rows(text)] == ["test"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", "fedavg"], "say what to vary"),
        (["--grid", "lr=0.1", "--processes", "2", "--ray", "auto"], "choose one of them"),
        (["--grid", "lr=0.1", "--ray-gpus", "1"], "--ray-gpus is for --ray"),
        (["--grid", "lr=0.1", "--ray", "127.0.0.1:9"], "`ray start --head`"),
        (["--grid", "lr=0.1", "--select", "luck"], "unknown way to choose 'luck'"),
        (["--grid", "lr=0.1", "--select", "validation", "--validation", "0"], "needs validation data"),
        (["--grid", "lr=-1"], "lr = -1"),
        (["--grid", "lr=fast"], "lr = 'fast'"),
        (["--grid", "lr=0.1", "--methods", "fedavv"], "did you mean 'fedavg'"),
        (["--grid", "lr=0.1", "--data", "cifar100"], "run `feddpc data get cifar100`"),
        (["show", "nowhere"], "there is no folder nowhere"),
        (["show", "."], "holds no sweep"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(feddpc, tmp_path, monkeypatch, args, said):
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path / "cache"))
    err = feddpc("sweep", *args, *([] if args[0] == "show" else ["--out", "S"]), code=2)
    assert said in err
    assert not (tmp_path / "S" / "sweep.toml").exists() or "--ray" in args


def test_progress_on_a_terminal_is_one_bar():
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with Many(console, "sweep") as show:
        show(Progress(total=4, ended=1, failed=1, running=1, rounds=7, all_rounds=16))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "7/16" in text
    assert "1/4 runs, 1 failed" in text


def test_a_broken_plan_is_said(feddpc, tmp_path):
    (tmp_path / "S").mkdir()
    (tmp_path / "S" / "sweep.toml").write_text("methods = 3")
    assert "S/sweep.toml cannot be read" in feddpc("sweep", "--out", "S", code=2)


def test_a_folder_that_holds_something_else_is_left_alone(feddpc, tmp_path):
    (tmp_path / "S").mkdir()
    (tmp_path / "S" / "thesis.txt").write_text("years of work")
    said = feddpc("sweep", "--methods", "fedavg", "--grid", "lr=0.3", *SMALL, "--out", "S", code=2)
    assert "S holds thesis.txt, which is no part of a sweep: choose another --out" in said
    assert not (tmp_path / "S" / "sweep.toml").exists()


def test_results_go_to_a_new_folder_by_default(feddpc, tmp_path):
    feddpc("sweep", "--methods", "fedavg", "--grid", "lr=0.3", *SMALL, "--quiet")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"sweep-\d{8}-\d{6}", folder.name)
    assert time.strftime("%Y") in folder.name
