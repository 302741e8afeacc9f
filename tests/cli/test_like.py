"""`feddpc run --like FOLDER`, as a person uses it."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.errors import BadInputError, RunFolderError

QUICK = ["--clients", "20", "--cohort", "4", "--model", "mlp", "--rounds", "3"]


def feddpc(*args):
    """Run a command; an error of its user is raised, and printed by `main` in one line."""
    done = CliRunner().invoke(app, [*map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feddpc("run", *QUICK, "--method", "feddpc", "--set", "lam=0.5", "--engine", "stacked", "--out", "first")
    return tmp_path / "first"


def without_seconds(folder):
    return re.sub(rb'"seconds": [^,]+,', b"", (folder / "rounds.jsonl").read_bytes())


def test_a_run_comes_out_again(first, tmp_path):
    done = feddpc("run", "--like", "first", "--out", "again")
    assert "records bit-identical to those of first in the 3 rounds that both have" in done.stdout
    assert done.stderr == ""
    assert without_seconds(tmp_path / "again") == without_seconds(first)
    for name in ("config.toml", "model.safetensors", "holdings.json"):
        assert (tmp_path / "again" / name).read_bytes() == (first / name).read_bytes()


def test_flags_win_and_are_named(first, tmp_path):
    (tmp_path / "more.toml").write_text("rounds = 2\n[hyper]\nlam = 0.25\n")
    done = feddpc("run", "--like", "first", "--seed", 1, "--config", "more.toml", "--out", "again", "--json")
    like = json.loads(done.stdout)["like"]
    assert like["changed"] == ["rounds = 2, was 3", "seed = 1, was 0", "hyper.lam = 0.25, was 0.5"]
    assert (like["identical"], like["rounds"]) == (False, 2)
    assert "changed from first: rounds = 2, was 3, seed = 1, was 0, hyper.lam = 0.25" in done.stderr
    assert feddpc("run", "--like", "first", "--seed", 1, "--out", "quiet", "--quiet").output == ""


def test_mistakes_are_said(first, tmp_path):
    with pytest.raises(BadInputError, match="leave --resume out"):
        feddpc("run", "--like", "first", "--out", "again", "--resume")
    with pytest.raises(RunFolderError, match="absent is no run folder"):
        feddpc("run", "--like", "absent")
    (first / "environment.json").unlink()
    with pytest.raises(RunFolderError, match=r"run the settings alone with --config first/config\.toml"):
        feddpc("run", "--like", "first")
    assert {p.name for p in tmp_path.iterdir()} == {"first"}
    done = feddpc("run", "--config", "first/config.toml", "--out", "again")  # the remedy
    assert done.exit_code == 0
    assert without_seconds(tmp_path / "again") == without_seconds(first)


def test_a_mistake_is_one_line_and_exit_code_2(first, monkeypatch, capsys):
    from feddpc.cli import main

    monkeypatch.setattr(sys, "argv", ["feddpc", "run", "--like", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: nowhere is no run folder: it has no config.toml\n"


CODE = """
import pathlib
from feddpc.methods import FedAvg

pathlib.Path("ran").touch()

class Mine(FedAvg):
    name = "mine"
"""


@pytest.mark.parametrize("how", [["run", "--like"], ["run", "--resume", "--out"]])
def test_code_that_only_a_folder_names_is_not_run(tmp_path, monkeypatch, how):
    """A folder may come from anybody."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    feddpc("run", *QUICK, "--method", "mine.py:Mine", "--out", "theirs")
    (tmp_path / "ran").unlink()
    (tmp_path / "mine.py").write_text(CODE + "# another file, which was not loaded before\n")
    with pytest.raises(BadInputError, match=r"names code, mine\.py:Mine"):
        feddpc(*how, "theirs")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "mine.py").write_text(CODE)  # a resumed run wants the code that it was begun with
    assert feddpc(*how, "theirs", "--method", "mine.py:Mine").exit_code == 0


def test_code_that_only_the_folder_of_a_comparison_names_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    feddpc("compare", *QUICK, "--methods", "mine.py:Mine,fedavg", "--out", "theirs")
    with pytest.raises(BadInputError, match=r"names code, mine\.py:Mine"):
        feddpc("compare", "--resume", "--out", "theirs")
    assert feddpc("compare", "--resume", "--out", "theirs", "--methods", "mine.py:Mine").exit_code == 0


def test_another_method_keeps_what_it_needs(first, tmp_path):
    assert feddpc("run", "--like", "first", "--method", "datasharing", "--out", "again").exit_code == 0
