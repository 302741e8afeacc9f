"""Prometheus's text format for a run: metrics from its records and refusals, written by hand.

Everything is counted from records, so the counters continue where they were after a restart of the server.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Why replies do not count, as labels: the reasons themselves hold numbers and texts of nodes, and would make a new
#: time series each. The first pattern that is found decides.
REASONS = {
    "protocol": r"protocols? \d|without a protocol|states the version",
    "client_refused": r"^the node says",
    "unreachable": r"^error [345]:",  # Flower's codes for nodes that are gone
    "client_error": r"^error -?\d",
    "not_finite": r"not finite|\b(nan|inf)\b|beyond|negative",
    "too_long": r"has norm .* more than",
    "screened": r"longer than usual|did not choose",
    "too_few_replies": r"it could be used, but|fewer than \d",
    "unexpected": r"was not asked|answered already|it answers for round|it says it is|experiment is|method is|round is",
    "examples": r"examples|enrolled|^its weight",
    "form": r"lacks|shape|written as|no array|bytes|not expected|records, not one|not made of numbers"
    r"| is \w+, not \w+|not a number of",
}
OTHER = "other"
_PATTERNS = {label: re.compile(pattern, re.IGNORECASE) for label, pattern in REASONS.items()}


def reason_label(reason: str) -> str:
    """Return the kind of a refusal.

    >>> reason_label("delta has norm 7.2, more than 1"), reason_label("weight is not finite"), reason_label("?")
    ('too_long', 'not_finite', 'other')
    """
    return next((label for label, pattern in _PATTERNS.items() if pattern.search(reason)), OTHER)


@dataclass
class Counts:
    """What a run's records and refusals add up to."""

    last: dict[str, Any] = field(default_factory=dict)  #: the record of the last round
    measured: dict[str, float] = field(default_factory=dict)  #: metrics of the last round that measured them
    replies: int = 0
    missing: int = 0
    void: int = 0
    rounds: int = 0
    seconds: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Count a round."""
        self.last = dict(record)
        self.rounds += 1
        self.replies += len(record.get("participants", ()))
        self.missing += len(record.get("dropped", ()))
        asked = record.get("dropped") or record.get("rejected")  # a round may ask nobody, by its coins
        self.void += bool(asked) and not record.get("participants")
        self.seconds += float(record.get("seconds") or 0.0)
        tested = ((name, value) for name, value in record.items() if name.startswith(("test_", "validation_")))
        measured = {name: float(value) for name, value in tested if isinstance(value, int | float)}
        self.measured = measured or self.measured  # names of clients' metrics may change: old ones are not kept

    def add_refusal(self, reason: str) -> None:
        """Count a reply that does not count."""
        self.refusals[reason_label(reason)] += 1


@dataclass
class Page:
    """The text of an answer."""

    lines: list[str] = field(default_factory=list)

    def add(
        self, name: str, kind: str, about: str, samples: Iterable[tuple[Mapping[str, str], float | int | None]]
    ) -> None:
        """Add a metric; samples without a value are left out, and so is a metric without samples."""
        values = [(labels, value) for labels, value in samples if value is not None]
        if values:
            self.lines += [f"# HELP feddpc_{name} {_escape_help(about)}", f"# TYPE feddpc_{name} {kind}"]
            self.lines += [f"feddpc_{name}{_labels(labels)} {_number(value)}" for labels, value in values]

    def one(self, name: str, kind: str, about: str, value: float | int | None) -> None:
        """Add a metric of one value."""
        self.add(name, kind, about, [({}, value)])

    def text(self) -> str:
        """Return the whole."""
        return "".join(f"{line}\n" for line in self.lines)


def render_info(info: Mapping[str, str]) -> str:
    """Return what the server is, which is known before its run begins."""
    page = Page()
    page.add("info", "gauge", "Release, protocols and method of the server.", [(info, 1)])
    return page.text()


def render(
    counts: Counts, info: Mapping[str, str], planned: int | None, primary: str, traffic: Mapping[str, int]
) -> str:
    """Return what Prometheus reads.

    Args:
        counts: what the records add up to.
        info: what the server is, as labels.
        planned: with which round the run ends, if that is known.
        primary: the record's name of the primary metric.
        traffic: bytes by direction, ``in`` and ``out``.
    """
    page, last = Page(), counts.last
    page.lines.append(render_info(info).rstrip())
    page.one("round", "gauge", "The last finished round.", last.get("round", 0))
    page.one("rounds_planned", "gauge", "The round with which the run ends.", planned)
    page.one("void_rounds_total", "counter", "Rounds in which no reply counted.", counts.void)
    measured = [({"name": name, "primary": str(name == primary).lower()}, v) for name, v in counts.measured.items()]
    page.add("metric", "gauge", "The last values that the server measured.", measured)
    page.one("train_loss", "gauge", "Training loss of the last round.", _plain(last.get("train_loss")))
    page.one("replies", "gauge", "Replies that counted in the last round.", len(last.get("participants", ())))
    page.one("replies_total", "counter", "Replies that counted.", counts.replies)
    page.one("missing_replies_total", "counter", "Invited clients that did not answer.", counts.missing)
    refused = [({"reason": label}, counts.refusals[label]) for label in (*REASONS, OTHER)]
    page.add("refusals_total", "counter", "Replies that did not count, by the kind of reason.", refused)
    page.one("round_seconds", "gauge", "Seconds of the last round.", _plain(last.get("seconds")))
    page.one("round_seconds_sum", "counter", "Seconds of all rounds.", counts.seconds)
    page.one("round_seconds_count", "counter", "Finished rounds.", counts.rounds)
    bytes_of = [({"direction": way}, value) for way, value in traffic.items()]
    page.add("bytes_total", "counter", "Bytes of the messages' contents, in and out of the server app.", bytes_of)
    page.one("epsilon", "gauge", "Privacy budget spent so far.", _plain(last.get("epsilon")))
    quarantined = last.get("quarantined")
    page.one("quarantined_nodes", "gauge", "Nodes in quarantine.", _length(quarantined))
    return page.text()


def _plain(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _length(value: Any) -> float | None:
    """Return how many there are of a list or table, or a count itself; a record without it means none."""
    if value is None:
        return 0.0
    return float(len(value)) if isinstance(value, list | dict) else _plain(value)


def _number(value: float | int) -> str:
    """Return a number as Prometheus writes it.

    >>> _number(3), _number(0.5), _number(float("inf")), _number(float("nan"))
    ('3', '0.5', '+Inf', 'NaN')
    """
    if math.isfinite(value):
        return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def _labels(labels: Mapping[str, str]) -> str:
    """Return labels in braces, with escaped values.

    >>> print(_labels({"reason": 'a "b"' + chr(92) + chr(10) + "c"}))
    {reason="a \\"b\\"\\\\\\nc"}
    """
    parts = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return "{" + ",".join(parts) + "}" if parts else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
