"""The reference page is generated, and its facts are those of the registries."""

import reference
from feddpc import config


def test_the_committed_page_is_up_to_date():
    text = reference.PAGE.read_text(encoding="utf-8")
    assert reference.page(text) == text, "run tools/reference.py"


def test_every_key_is_a_row():
    rows = reference.keys()
    for name, facts in config.keys().items():
        assert (f"| `{name}` |" in rows) == (facts.options_of in (None, name))
        assert facts.group in config.GROUPS
