"""A finished run stays finished when its pictures or its page cannot be made."""

import errno
import json

import pytest
from typer.testing import CliRunner

import forked
from feddpc.cli import app
from feddpc.report import figures, page
from feddpc.runs.record import read_records

QUICK = ["--clients", "20", "--cohort", "4", "--model", "mlp", "--rounds", "2", "--engine", "loop"]


def without(modules, *args, cwd):
    """Run a command in a process that lacks these modules."""
    return forked.run(forked.command_line_without, modules, *args, cwd=cwd)


@pytest.mark.parametrize("modules", [["plotly"], ["matplotlib"], ["plotly", "matplotlib"]])
def test_a_run_without_what_draws(tmp_path, modules):
    done = without(modules, "run", *QUICK, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    for part in (*modules, "pip install", "feddpc report r"):
        assert part in line
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "finished"
    assert len(read_records(tmp_path / "r" / "rounds.jsonl")) == 2
    assert (tmp_path / "r" / "table.csv").exists()
    assert (tmp_path / "r" / "report.html").exists() == ("plotly" not in modules)
    assert (tmp_path / "r" / "curves.png").exists() == ("matplotlib" not in modules)
    report = without(modules, "report", "r", cwd=tmp_path)
    assert report.returncode == 2
    assert "pip install" in report.stderr
    assert "Traceback" not in report.stderr
    assert CliRunner().invoke(app, ["report", str(tmp_path / "r")]).exit_code == 0
    assert (tmp_path / "r" / "report.html").exists()
    assert (tmp_path / "r" / "curves.png").exists()


def test_quiet_and_json_say_it_on_standard_error(tmp_path):
    done = without(
        ["plotly"], "compare", "--methods", "fedavg", *QUICK, "--out", "c", "--json", "--quiet", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [run["rounds"] for run in json.loads(done.stdout)["runs"]] == [2]
    assert len(done.stderr.splitlines()) == 1
    assert "feddpc report c" in done.stderr


def test_any_failure_of_a_picture(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*_, **__):
        raise ValueError("a bug\nin two lines")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "save", full)
    monkeypatch.setattr(page, "render", broken)
    done = CliRunner().invoke(app, ["run", *QUICK, "--out", "r"])
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert "curves.png" in line
    assert "report.html" in line
    assert "a bug" in line
    with pytest.raises(ValueError, match="a bug"):
        page.write_page(tmp_path / "r" / "report.html", page_runs(tmp_path / "r"))


def page_runs(folder):
    from feddpc.report import tables

    return tables.collect(folder, [])
