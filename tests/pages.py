"""What the tests of pages share."""

import json
from html.parser import HTMLParser

import pytest

#: A name that would like to be a program: as HTML, in a template, in JSON, in a chart's text.
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>$title&amp;\u2028%{x}"
#: Three clients with some samples of two classes.
HELD = {"classes": ["cat", "dog"], "counts": [[3, 0], [1, 4], [0, 2]]}
#: Elements without an end.
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart; a tag that is not closed in order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(t for tag, texts in self.texts.items() if tag not in ("script", "style") for t in texts)

    @property
    def data(self):
        """The embedded numbers; the library and our script come after them."""
        return json.loads(self.texts["script"][0], parse_constant=pytest.fail)
