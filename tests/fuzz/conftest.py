"""Scripts and what they import are no tests: some watch what they import, some change what they fuzz."""

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
