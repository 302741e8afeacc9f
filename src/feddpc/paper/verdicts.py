"""How a claim is decided: comparisons of two rows over seeds, one rule for all.

A comparison is decided by the paired t test over seeds, with Holm's correction over all comparisons that the claim asks
for, at 5 %. Where it decides nothing, nobody can tell from these seeds: the difference lies within their spread. A
claim holds if every comparison is decided for it, and does not hold if one is decided against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from feddpc.paper.statistics import LEVEL, Paired, corrected, holm, paired
from feddpc.paper.study import Row

Verdict = Literal["holds", "does not hold", "cannot be told"]


@dataclass(frozen=True)
class Finding:
    """A claim, the verdict and the numbers behind it."""

    part: str
    claim: str
    verdict: Verdict
    numbers: str
    line: int | None = None  #: of the claim in paper.tex; None for a control, which the paper lacks


@dataclass(frozen=True)
class Contest:
    """One comparison that a claim asks for: the claim is that the differences to ``rival`` are above zero."""

    rival: str
    result: Paired


def judge(contests: Sequence[Contest]) -> Verdict:
    """Return the verdict on "all differences are above zero"."""
    p_values = [c.result.t for c in contests if c.result.t is not None]
    if not p_values or len(p_values) < len(contests):
        return "cannot be told"
    decided = [q <= LEVEL for q in holm(p_values)]
    above = [c.result.about.mean > 0 for c in contests]
    if any(sure and not up for sure, up in zip(decided, above, strict=True)):
        return "does not hold"
    return "holds" if all(decided) else "cannot be told"


def standing(asked: Sequence[Contest]) -> dict[str, list[str]]:
    """Return above which rivals ours is, below which, and from which it cannot be told: decided like a claim on all."""
    places: dict[str, list[str]] = {"above": [], "below": [], "not to be told from": []}
    for contest, p in zip(asked, corrected([c.result.t for c in asked]), strict=True):
        place = "above" if contest.result.about.mean > 0 else "below"
        places[place if p is not None and p <= LEVEL else "not to be told from"].append(contest.rival)
    return places


def contests(ours: Row, rivals: Sequence[Row], measure: str, margin: float = 0.0) -> list[Contest]:
    """Compare ``ours`` with each rival: above it by more than ``margin``; below it, for the loss."""
    found = []
    for rival in rivals:
        a, b = ours.of(measure), rival.of(measure)
        result = paired(b, a) if measure == "loss" else paired(_less(a, margin), b)
        if result is not None:
            found.append(Contest(rival.line.label, result))
    return found


def _less(values: Mapping[int, float], margin: float) -> dict[int, float]:
    return {seed: value - margin for seed, value in values.items()}


def above(
    part: str, claim: str, ours: Row, rivals: Sequence[Row], measure: str = "best", line: int | None = None
) -> Finding:
    """Judge "``ours`` is above each rival"."""
    asked = contests(ours, rivals, measure)
    return Finding(part, claim, judge(asked), differences(asked, measure), line)


def differences(asked: Sequence[Contest], measure: str) -> str:
    """Return the numbers of comparisons: mean difference to each rival, 95 % interval, corrected p."""
    if not asked:
        return "no seed in common"
    factor, unit = (-1.0, "loss, against") if measure == "loss" else (100.0, "points over")
    words = []
    for contest, p in zip(asked, corrected([c.result.t for c in asked]), strict=True):
        about = contest.result.about
        sure = "one seed"
        if about.low is not None and about.high is not None:
            low, high = sorted((factor * about.low, factor * about.high))
            sure = f"{low:+.2f} to {high:+.2f}, p {show_p(p)}"
        words.append(f"{contest.rival} {factor * about.mean:+.2f} ({sure})")
    return f"{unit} {'; '.join(words)}"


def show_p(p: float | None) -> str:
    """Return a p-value for people.

    >>> show_p(0.03121), show_p(0.0000012), show_p(1.0), show_p(None)
    ('0.031', '<0.001', '1', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.2g}"
