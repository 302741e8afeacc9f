"""Every example of docs/learn-anything.md runs as it stands."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "learn-anything.md"


def examples(text: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page, each with the heading above it."""
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        heading = re.findall(r"^#+ (.+)$", text[: match.start()], re.MULTILINE)[-1]
        found.append((heading, match[1]))
    return found


EXAMPLES = examples(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[heading for heading, _ in EXAMPLES])
def test_the_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    names = runpy.run_path("example.py")
    results = [value for name, value in names.items() if type(value).__name__ in ("Result", "Comparison")]
    assert results
    assert all(result.status in ("finished", "stopped") for result in results if hasattr(result, "status"))
