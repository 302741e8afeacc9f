"""How a claim is decided: comparisons of two rows over seeds, one rule for all.

A comparison is decided by the paired t test over seeds at 5 %, with Holm's correction over the family of comparisons
that it belongs to, so that a difference has one p-value wherever it is shown. A claim holds if every comparison is
decided for it, does not hold if one is decided against it, and otherwise cannot be told from these seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from feddpc.paper.statistics import LEVEL, Paired, holm, paired
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
    p: float | None  #: corrected for its family; None for one seed


def family(results: Sequence[tuple[str, Paired | None]]) -> list[Contest]:
    """Return the comparisons with each rival, corrected for all of them; those without a common seed are left out."""
    known = [(rival, result) for rival, result in results if result is not None]
    corrected = holm([result.p for _, result in known])
    return [Contest(rival, result, p) for (rival, result), p in zip(known, corrected, strict=True)]


def judge(contests: Sequence[Contest]) -> Verdict:
    """Return the verdict on "all differences are above zero"."""
    if not contests or any(c.p is None for c in contests):
        return "cannot be told"
    decided = {c.result.about.mean > 0 for c in contests if c.p is not None and c.p <= LEVEL}
    if False in decided:
        return "does not hold"
    return "holds" if all(c.p is not None and c.p <= LEVEL for c in contests) else "cannot be told"


def standing(asked: Sequence[Contest]) -> dict[str, list[str]]:
    """Return the rivals that ours is above, those that it is below, and those where it cannot be told."""
    places: dict[str, list[str]] = {"above": [], "below": [], "not to be told from": []}
    for contest in asked:
        place = "above" if contest.result.about.mean > 0 else "below"
        decided = contest.p is not None and contest.p <= LEVEL
        places[place if decided else "not to be told from"].append(contest.rival)
    return places


def contests(ours: Row, rivals: Sequence[Row], measure: str, margin: float = 0.0) -> list[Contest]:
    """Compare ``ours`` with each rival, as one family: above it by more than ``margin``; below it, for the loss."""
    results = []
    for rival in rivals:
        a, b = ours.of(measure), rival.of(measure)
        result = paired(b, a) if measure == "loss" else paired(_less(a, margin), b)
        results.append((rival.line.label, result))
    return family(results)


def _less(values: Mapping[int, float], margin: float) -> dict[int, float]:
    return {seed: value - margin for seed, value in values.items()}


def above(
    part: str,
    claim: str,
    ours: Row,
    rivals: Sequence[Row],
    measure: str = "best",
    line: int | None = None,
    among: Sequence[Row] | None = None,
) -> Finding:
    """Judge "``ours`` is above each rival", with p-values corrected for all rows ``among`` which the rivals are."""
    labels = {row.line.label for row in rivals}
    asked = [c for c in contests(ours, among or rivals, measure) if c.rival in labels]
    return Finding(part, claim, judge(asked), differences(asked, measure), line)


def differences(asked: Sequence[Contest], measure: str) -> str:
    """Return the numbers of comparisons: mean difference to each rival, 95 % interval, corrected p."""
    if not asked:
        return "no seed in common"
    factor, unit = (-1.0, "loss, against") if measure == "loss" else (100.0, "points over")
    words = []
    for contest in asked:
        about = contest.result.about
        certainty = "one seed"
        if about.low is not None and about.high is not None:
            low, high = sorted((factor * about.low, factor * about.high))
            certainty = f"{low:+.2f} to {high:+.2f}, p {show_p(contest.p)}"
        words.append(f"{contest.rival} {factor * about.mean:+.2f} ({certainty})")
    return f"{unit} {'; '.join(words)}"


def show_p(p: float | None) -> str:
    """Return a p-value for people.

    >>> show_p(0.03121), show_p(0.0000012), show_p(1.0), show_p(None)
    ('0.031', '<0.001', '1', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.2g}"
