"""`--resume` where there is nothing to resume: an error that says what is there and what to type, and no new run."""

import shutil

import pytest
from typer.testing import CliRunner

import feddpc
from feddpc.cli import app
from feddpc.errors import RunFolderError
from feddpc.runs.record import read_records
from support import blobs, tiny_net, uneven

QUICK = ["--clients", "20", "--cohort", "4", "--model", "mlp", "--rounds", "2", "--engine", "loop"]


def command(*args):
    """Run a command; an error of its user is raised, and printed by `main` in one line with exit code 2."""
    done = CliRunner().invoke(app, [*map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def from_python(out):
    return feddpc.simulate(
        data=blobs(), model=tiny_net(), partition=uneven(90), cohort=3, rounds=2, engine="loop", out=out, resume=True
    )


def run(out):
    return command("run", "--resume", "--out", out)


def compare(out):
    return command("compare", "--resume", "--out", out)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


ways = pytest.mark.parametrize("resume", [run, compare, from_python])


@ways
def test_a_folder_that_is_not_there(here, resume):
    with pytest.raises(RunFolderError, match=r"(?s)no folder runs/absent.*--resume"):
        resume("runs/absent")
    assert list(here.iterdir()) == []


@ways
def test_an_empty_folder(here, resume):
    (here / "mine").mkdir()
    with pytest.raises(RunFolderError, match=r"mine.*empty"):
        resume("mine")
    assert list((here / "mine").iterdir()) == []


@ways
def test_a_folder_of_something_else(here, resume):
    (here / "paper").mkdir()
    (here / "paper" / "text.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="paper"):
        resume("paper")
    with pytest.raises(RunFolderError, match=r"text\.tex.*file"):
        resume("paper/text.tex")
    assert [path.name for path in here.rglob("*")] == ["paper", "text.tex"]


@ways
def test_a_run_that_was_stopped_before_its_settings_were_saved(here, resume):
    """Nothing says what it was to be, so it cannot be continued; without --resume the folder can be used."""
    (here / "early").mkdir()
    (here / "early" / ".lock").touch()
    (here / "early" / "environment.json").write_text("{}")
    with pytest.raises(RunFolderError, match="early"):
        resume("early")
    command("run", *QUICK, "--out", "early")
    assert len(read_records(here / "early" / "rounds.jsonl")) == 2


def test_runs_with_similar_names_are_suggested(here):
    command("run", *QUICK, "--out", "runs/feddpc-1")
    command("compare", *QUICK, "--methods", "fedavg", "--out", "runs/fedavg-1")
    for resume in (run, from_python):
        with pytest.raises(RunFolderError, match="Did you mean runs/feddpc-1") as error:
            resume("runs/fedpdc-1")
        assert "fedavg-1" not in str(error.value)
    with pytest.raises(RunFolderError, match="Did you mean runs/fedavg-1"):
        compare("runs/fedavg-2")


def test_the_folder_of_another_kind_is_named(here):
    command("compare", *QUICK, "--methods", "fedavg", "--out", "X")
    with pytest.raises(RunFolderError, match=r"comparison.*feddpc compare --resume --out X"):
        run("X")
    with pytest.raises(RunFolderError, match=r"feddpc run --resume --out X/fedavg-seed0"):
        compare("X/fedavg-seed0")
    (here / "X" / "compare.json").unlink()
    with pytest.raises(RunFolderError, match="Did you mean X/fedavg-seed0"):
        run("X")


def test_a_run_before_its_first_checkpoint_is_resumed(here):
    command("run", *QUICK, "--method", "fedavg", "--out", "r")
    whole = read_records(here / "r" / "rounds.jsonl")
    for name in ("rounds.jsonl", "summary.json", "model.safetensors"):
        (here / "r" / name).unlink()
    shutil.rmtree(here / "r" / "checkpoint")
    run("r")
    assert [r["test_loss"] for r in read_records(here / "r" / "rounds.jsonl")] == [r["test_loss"] for r in whole]
