"""What the texts tell people to install: never this package by its name, which on an index is not ours."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("src", "docs", "examples", "deploy")
SUFFIXES = {"", ".py", ".md", ".txt", ".toml", ".yaml", ".html", ".service", ".js"}
FILES = [path for place in PLACES for path in sorted((ROOT / place).rglob("*")) if path.is_file()]
FILES = [path for path in [*FILES, *ROOT.glob("*.md")] if path.suffix in SUFFIXES and path.name != "CHANGELOG.md"]
#: Extras by the name alone, unless it says from which file; and the name in a command that installs.
EXTRAS = re.compile(r"(?<![\w./-])feddpc\[\w[\w,]*\](?! @ file:)")
COMMAND = re.compile(
    r"\b(?:pip|pipx|uv|conda|poetry)\b[^\n`#;|]*\b(?:install|add|download)\b[^\n`#;|]*(?<![\w./-])feddpc(?![\w./-])"
)


def named(text):
    """The places where a text has this package looked up on an index."""
    return EXTRAS.findall(text) + COMMAND.findall(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install feddpc",
        "pip install -U 'feddpc[dp]'",
        "`feddpc[flower]`",
        "uv pip install feddpc==1.0",
        "pipx install feddpc",
    ],
)
def test_a_name_that_an_index_would_be_asked_for_is_noticed(text):
    assert named(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install '.[dp]'",
        "pip install './feddpc[flower]'",
        "pip install 'dist/feddpc-VERSION-py3-none-any.whl[flower]'",
        "pip install x\nfeddpc run",
        "pip install '.[dp]'; feddpc run",
        "pip install '.[dp]'  # for feddpc run",
        '"feddpc[flower] @ file://$(ls *.whl)"',
        "install feddpc's app",
    ],
)
def test_paths_and_other_commands_are_not(text):
    assert not named(text)


def test_no_text_installs_this_package_by_its_name():
    assert len(FILES) > 300
    found = {str(path.relative_to(ROOT)): named(path.read_text("utf-8")) for path in FILES}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_messages_name_packages_as_the_extras_do():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {requirement for extra in about["optional-dependencies"].values() for requirement in extra}
    asked = set()
    for path in (ROOT / "src").rglob("*.py"):
        for command in re.findall(r"pip install ('[^']*>=[^']*'(?: '[^']*')*)", path.read_text("utf-8")):
            asked |= {requirement for requirement in re.findall(r"'([^']*)'", command) if "{" not in requirement}
    assert {"pandas>=2.1", "pyarrow>=14", "dp-accounting>=0.6"} <= asked <= known
