"""The document in the repository is what the committed records say, word for word."""

import re
from pathlib import Path

from feddpc.paper import documents, records

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reproduction.md"


def test_the_document_is_up_to_date():
    """If not: feddpc reproduce docs results/*.json."""
    studies = records.read_all(sorted((ROOT / "results").glob("*.json")))
    assert documents.render(studies, "images/reproduction") == DOCUMENT.read_text(encoding="utf-8")


def test_its_figures_are_there():
    addresses = re.findall(r"!\[[^]]*\]\(([^)]*)\)", DOCUMENT.read_text(encoding="utf-8"))
    assert addresses
    assert all((DOCUMENT.parent / address).is_file() for address in addresses)
