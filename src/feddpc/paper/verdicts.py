"""How a claim is decided: comparisons of two rows over seeds, one rule for all.

A comparison is decided by the paired t test over seeds at 5 %, with Holm's correction over the family of comparisons
that it belongs to, so that a difference has one p-value wherever it is shown. A claim holds if every comparison is
decided for it, does not hold if one is decided against it, and otherwise cannot be told from these seeds.

The families, by alpha and measure: FedDPC with all other rows of Table 2; then what figure 4 compares; then what figure
5 compares. A comparison of the same runs that was made before keeps its p-value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from feddpc.paper.significance import LEVEL, Estimate, holm, paired
from feddpc.paper.study import PaperRow

Verdict = Literal["holds", "does not hold", "cannot be told"]


#: Two rows that are compared, and the corrected p-values of comparisons.
Pair = tuple[PaperRow, PaperRow]
PValues = Mapping[frozenset[str], float | None]


@dataclass(frozen=True)
class Finding:
    """A claim, the verdict and the numbers behind it."""

    part: str
    claim: str
    verdict: Verdict
    numbers: str
    line: int | None = None  #: of the claim in paper.tex; None for a control, which the paper lacks


@dataclass(frozen=True)
class RivalComparison:
    """One comparison that a claim needs: the claim is that the difference to ``rival`` is above zero."""

    rival: str
    difference: Estimate
    p: float | None  #: corrected for its family; None for one seed

    @property
    def above(self) -> bool | None:
        """Whether the difference is above zero; None if the seeds cannot tell."""
        return self.difference.mean > 0 if self.p is not None and self.p <= LEVEL else None


def family(differences: Sequence[tuple[str, Estimate | None]]) -> list[RivalComparison]:
    """Return the comparisons with each rival, corrected for all of them; those without a common seed are left out."""
    known = [(rival, difference) for rival, difference in differences if difference is not None]
    corrected = holm([difference.p for _, difference in known])
    return [RivalComparison(rival, difference, p) for (rival, difference), p in zip(known, corrected, strict=True)]


def compare(
    ours: PaperRow, rivals: Sequence[PaperRow], measure: str, margin: float = 0.0, known: PValues | None = None
) -> list[RivalComparison]:
    """Compare ``ours`` with each rival: above it by more than ``margin``; below it, for the loss.

    The rivals are one family, unless the p-values are ``known`` from larger ones.
    """
    mine = {seed: value - margin for seed, value in ours.values(measure).items()}
    theirs = [(rival, rival.values(measure)) for rival in rivals]
    found = [(rival, paired(v, mine) if measure == "loss" else paired(mine, v)) for rival, v in theirs]
    if known is None:
        return family([(rival.label, difference) for rival, difference in found])
    return [RivalComparison(r.label, about, known[_pair(ours, r)]) for r, about in found if about is not None]


def p_values(families: Sequence[Sequence[Pair]], measure: str) -> PValues:
    """Return the corrected p-value of every comparison; one that is in several families belongs to the first."""
    known: dict[frozenset[str], float | None] = {}
    for pairs in families:
        fresh = {key: (a, b) for a, b in pairs if (key := _pair(a, b)) not in known}
        tests = [paired(a.values(measure), b.values(measure)) for a, b in fresh.values()]
        known |= zip(fresh, holm([None if test is None else test.p for test in tests]), strict=True)
    return known


def _pair(a: PaperRow, b: PaperRow) -> frozenset[str]:
    """Return what tells a comparison from others: the two configurations, whatever the rows are called."""
    return frozenset(repr(row.config) for row in (a, b))


def judge(comparisons: Sequence[RivalComparison]) -> Verdict:
    """Return the verdict on "all differences are above zero"."""
    outcomes = {comparison.above for comparison in comparisons}
    if not comparisons or any(comparison.p is None for comparison in comparisons):
        return "cannot be told"
    if False in outcomes:
        return "does not hold"
    return "cannot be told" if None in outcomes else "holds"


def standing(comparisons: Sequence[RivalComparison]) -> dict[str, list[str]]:
    """Return the rivals that ours is above, those that it is below, and those where it cannot be told."""
    places = {True: "above", False: "below", None: "not to be told from"}
    return {word: [c.rival for c in comparisons if c.above is place] for place, word in places.items()}


def above(
    part: str,
    claim: str,
    ours: PaperRow,
    rivals: Sequence[PaperRow],
    measure: str = "best",
    line: int | None = None,
    known: PValues | None = None,
) -> Finding:
    """Judge "``ours`` is above each rival"; the rivals are one family, unless their p-values are ``known``."""
    comparisons = compare(ours, rivals, measure, known=known)
    return Finding(part, claim, judge(comparisons), show_differences(comparisons, measure), line)


def show_differences(comparisons: Sequence[RivalComparison], measure: str) -> str:
    """Return the numbers of comparisons: mean difference to each rival, 95 % interval, corrected p."""
    if not comparisons:
        return "no seed in common"
    factor, unit = (-1.0, "loss, against") if measure == "loss" else (100.0, "points over")
    words = []
    for comparison in comparisons:
        difference, certainty = comparison.difference, "one seed"
        if difference.low is not None and difference.high is not None:
            low, high = sorted((factor * difference.low, factor * difference.high))
            certainty = f"{low:+.2f} to {high:+.2f}, p {show_p(comparison.p)}"
        words.append(f"{comparison.rival} {factor * difference.mean:+.2f} ({certainty})")
    return f"{unit} {'; '.join(words)}"


def show_p(p: float | None) -> str:
    """Return a p-value for people.

    >>> show_p(0.03121), show_p(0.0000012), show_p(1.0), show_p(None)
    ('0.031', '<0.001', '1', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.2g}"
