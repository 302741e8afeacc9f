"""Runs on several processes: what ranks say when one of them fails, and that they go on where they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from feddpc.errors import BadInputError
from feddpc.launch import environment, launch
from feddpc.ranks import Place, first_host, place, refuse_ranks

SCRIPT = Path(__file__).parent / "rank_script.py"
COMMON = ["--precision", "float64", "--clients", "20", "--cohort", "5", "--checkpoint-seconds", "0"]


@pytest.fixture
def alone(monkeypatch):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def test_torchruns_variables_say_which_rank_this_is(alone, monkeypatch):
    assert place() is None
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert place() == Place(5, 8, 1, 4)
    with pytest.raises(BadInputError, match="a sweep"):
        refuse_ranks("a sweep")


def test_slurms_variables_count_inside_srun_only(alone, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")  # a batch script has these, and starts one program
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert place() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert place() == Place(3, 4, 1, 2)


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[01-04]", "n01"), ("gpu-a[7,9-12],b3", "gpu-a7"), ("x1,x2", "x1")]
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_a_rank_that_is_no_number_is_named(alone, monkeypatch):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInputError, match="RANK = 'one'"):
        place()


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert environment(1, 2, 1234)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert environment(1, 2, 1234)["RANK"] == "1"


def test_the_code_of_a_rank_that_fails_is_returned():
    code = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    assert launch(2, [sys.executable, "-c", code]) == 3
    assert launch(2, [sys.executable, "-c", "pass"]) == 0


def feddpc(*words, start=()):
    command = [sys.executable, *start, "-m", "feddpc", "run", *COMMON, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean())


def clean():
    """The environment without what a rank would have."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def script(size, folder, **how):
    """Run the script on some ranks; return the exit code and what each rank said."""
    env = {f"TEST_{key.upper()}": str(value) for key, value in how.items()} | {"TEST_OUT": str(folder)}
    code = f"import sys; from feddpc.launch import launch; sys.exit(launch({size}, [sys.executable, {str(SCRIPT)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**clean(), **env}
    )
    said = {path.stem: path.read_text() for path in folder.parent.glob(f"{folder.name}-rank-*.txt")}
    return done.returncode, {int(name.rpartition("-")[2]): text for name, text in said.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Records of a whole run on two ranks, and what the ranks said."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, said = script(2, folder)
    assert code == 0
    assert said[0] == said[1]
    return records(folder), said


def records(folder):
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def close(left, right, atol=1e-10):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(value == pytest.approx(other[key], abs=atol) for key, value in one.items())


@pytest.mark.processes
@pytest.mark.parametrize(
    "start", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")], ids=["ranks", "torchrun"]
)
def test_two_processes_give_the_records_of_one(tmp_path, start):
    how = ["--method", "scaffold", "--rounds", "4", "--out"]
    assert feddpc(*how, str(tmp_path / "one")).returncode == 0
    more = [] if start else ["--ranks", "2"]
    done = feddpc(*how, str(tmp_path / "two"), *more, start=start)
    assert done.returncode == 0, done.stderr
    close(records(tmp_path / "one"), records(tmp_path / "two"))
    assert 'engine = "distributed"' in (tmp_path / "two" / "config.toml").read_text()
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["ranks"] == 2
    assert done.stdout.count("scaffold") == 1 + done.stdout.count("round 4/4"), "the ranks print one table"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cohort", "0"], "error: cohort = 0"),
        (["--method", "fedfoo"], "error: unknown method 'fedfoo'"),
        (["--out", "/dev/null/x"], "rank 0, making the run folder: /dev/null/x"),
    ],
    ids=["before the ranks meet", "on every rank", "on rank 0"],
)
def test_a_mistake_is_told_once(words, text):
    done = feddpc("--ranks", "3", *words)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_another_number_of_processes_goes_on(tmp_path):
    how = ["--method", "fedvarp", "--client-memory", "disk", "--out"]
    assert feddpc("--rounds", "6", *how, str(tmp_path / "whole")).returncode == 0
    for name, begin, end in (("down", ["--ranks", "3"], []), ("up", [], ["--ranks", "2"])):
        out = str(tmp_path / name)
        assert feddpc("--rounds", "3", *how, out, *begin).returncode == 0
        done = feddpc("--rounds", "6", *how, out, "--resume", *end)
        assert done.returncode == 0, done.stderr
        close(records(tmp_path / "whole"), records(tmp_path / name))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "rank 1, last seen in round 3"),
        ("raise", "rank 1 has failed: ValueError: oh dear"),
        ("hang", "rank 1, last seen in round 3 (evaluating): did not answer within 5 s"),
        ("drift", "has another model|no two ranks have one model"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path, whole, fault, words):
    code, said = script(2, tmp_path / "cut", fault=fault, timeout=5)
    assert code != 0
    assert any(word in said[0] for word in words.split("|")), said
    code, again = script(2, tmp_path / "cut", resume=1)
    assert code == 0, again
    assert (records(tmp_path / "cut"), again) == whole, "the same model, bit by bit, on both ranks"


@pytest.mark.processes
def test_torchrun_starts_ranks_again_and_they_go_on(tmp_path, whole):
    env = {**clean(), "TEST_OUT": str(tmp_path / "again"), "TEST_FAULT": "kill once"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        str(SCRIPT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    said = {int(p.stem[-1]): p.read_text() for p in tmp_path.glob("again-rank-*.txt")}
    assert (records(tmp_path / "again"), said) == whole


@pytest.mark.processes
def test_a_stop_on_one_rank_stops_all(tmp_path):
    code, said = script(2, tmp_path / "run", fault="stop")
    assert code == 0
    assert {text.split()[0] for text in said.values()} == {"stopped"}
    assert len(records(tmp_path / "run")) == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "words"),
    [("version", "feddpc '9.9'"), ("data", "data"), ("disk", "rank 1, looking at the run folder"), ("folder", "share")],
)
def test_what_is_wrong_on_one_rank_ends_all_before_round_1(tmp_path, fault, words):
    code, said = script(2, tmp_path / "run", fault=fault)
    assert code == 2
    assert all("rank 1" in text and words in text for text in said.values()), said
    assert not (tmp_path / "run" / "rounds.jsonl").exists() or not records(tmp_path / "run")
