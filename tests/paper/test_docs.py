"""The documents in the repository are what the committed records say, word for word."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.paper import documents, records

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reproduction.md"


@pytest.fixture(scope="module")
def studies():
    return records.read_all(sorted((ROOT / "results").glob("*.json")))


def test_the_documents_are_up_to_date(studies):
    """If not: feddpc reproduce docs results/*.json."""
    assert documents.render(studies, "images/reproduction") == DOCUMENT.read_text(encoding="utf-8")
    for name, text in documents.pages(studies, "images/reproduction").items():
        assert text == (DOCUMENT.parent / name).read_text(encoding="utf-8")
    written = {path.name for path in DOCUMENT.parent.glob("reproduction-*.md")}
    assert written == set(documents.pages(studies, "images/reproduction"))


def test_their_links_and_figures_are_there(studies):
    for path in (DOCUMENT, *DOCUMENT.parent.glob("reproduction-*.md")):
        addresses = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
        assert addresses
        assert all((DOCUMENT.parent / address).is_file() for address in addresses)


def test_the_records_are_small():
    assert (ROOT / "results" / "cifar10.json").stat().st_size < 1_852_735 / 4


def test_the_commands_of_the_plan_have_the_flags_that_they_use():
    blocks = re.findall(r"```\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"[\n;]", block) if line.strip().startswith("feddpc")]
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        depth = 2 if words[0] in ("reproduce", "data") else 1
        help = CliRunner().invoke(app, [*words[:depth], "--help"], env={"COLUMNS": "200"}).stdout
        flags = [word for word in words if word.startswith("--")]
        assert all(re.search(rf"{flag}\b", help) for flag in flags), line
