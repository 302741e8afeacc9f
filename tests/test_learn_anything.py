"""Every example of docs/learn-anything.md runs as it stands, and every command, with one round."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from feddpc.api import Comparison, Result
from feddpc.cli import app

TEXT = (Path(__file__).parents[1] / "docs" / "learn-anything.md").read_text(encoding="utf-8")
PYTHON, COMMANDS = re.split(r"^## On the command line.*$", TEXT, maxsplit=1, flags=re.MULTILINE)


def blocks(language: str, text: str) -> dict[str, str]:
    """Return the code blocks of a text by the last heading above each."""
    found = {}
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] == language:
            headings = re.findall(r"^#+ (.+)$", text[: match.start()], re.MULTILINE)
            found[headings[-1] if headings else ""] = match[2]
    return found


EXAMPLES = blocks("python", PYTHON)


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_runs(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(EXAMPLES[heading], encoding="utf-8")
    made = [v for v in runpy.run_path("example.py").values() if isinstance(v, Result | Comparison)]
    results = [r for one in made for r in (one.results.values() if isinstance(one, Comparison) else [one])]
    assert results
    assert {result.status for result in results} <= {"finished", "stopped"}


def test_no_example_hides_another():
    assert len(EXAMPLES) == PYTHON.count("```python\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(blocks("python", COMMANDS)[""], encoding="utf-8")
    (tmp_path / "own.toml").write_text(blocks("toml", COMMANDS)[""], encoding="utf-8")
    rows = [f"{i / 64},{i % 5 + 1},agent{i % 8},{i / 32 + i % 5 / 10}\n" for i in range(64)]
    (tmp_path / "houses.csv").write_text("area,rooms,agent,price\n" + "".join(rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("line", blocks("", COMMANDS)[""].splitlines())
def test_the_command_runs(line, folder):
    program, command, *words = shlex.split(line, comments=True)
    assert program == "feddpc"
    short = [] if command == "partition" else ["--rounds", "1", "--quiet", "--engine", "loop"]
    done = CliRunner().invoke(app, [command, *words, *short])
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
