"""What the paper claims, claim by claim, and whether it holds here; and what controls say that the paper lacks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from feddpc.paper import published
from feddpc.paper.statistics import estimate, paired
from feddpc.paper.study import Row, Study
from feddpc.paper.study_spec import DOUBLED, label
from feddpc.paper.verdicts import Finding, above, contests, differences, family, judge

#: "Performs very poorly" is read as: farther below lambda = 1 than this.
POORLY = 0.05
#: "A competitive amount of time" is read as: below so many times the median of the other methods.
COMPETITIVE = 1.1

Rows = dict[str, Row]


def findings(study: Study) -> list[Finding]:
    """Judge every claim for which the study has runs."""
    found: list[Finding] = []
    for alpha in study.alphas("table2"):
        found += _table2(_there(study, "table2", alpha), alpha, study)
    for alpha in study.alphas("figure4"):
        found += _ablation(_there(study, "figure4", alpha))
    for alpha in study.alphas("figure5"):
        found += _lambdas(_there(study, "figure5", alpha))
    return found


def _there(study: Study, part: str, alpha: float) -> Rows:
    return {row.line.name: row for row in study.part(part, alpha) if row.scores}


def _table2(rows: Rows, alpha: float, study: Study) -> list[Finding]:
    ours = rows.get("feddpc")
    rivals = [rows[name] for name in published.METHODS if name in rows and name != "feddpc"]
    if ours is None:
        return []
    here, found = f"alpha {alpha:g}", []
    others = [row for row in study.part("table2", alpha) if row is not ours]  # the family of the table of differences
    if rivals:
        best = f"{here}: FedDPC has the highest best accuracy of the paper's methods"
        loss = f"{here}: FedDPC's training loss falls faster than that of the others (mean over rounds)"
        absent = [label(name) for name in published.METHODS if name not in rows]
        found = [
            *_unless(absent, above("table2", best, ours, rivals, line=294, among=others), _order(rows, alpha, study)),
            *_unless(absent, _sooner(f"{here}: FedDPC is at each rival's best accuracy in fewer rounds", ours, rivals)),
            *_unless(absent, above("table2", loss, ours, rivals, "loss", line=294)),
            _quick(f"{here}: FedDPC takes a competitive time per round", ours, rivals, study.origin.get("at_once")),
        ]
    if ours.of("cosine"):
        found.append(_angle(f"{here}: updates lie at less than 90 degrees to the last global update", ours))
    if "fedavg" in rows:
        claim = f"{here}, control: FedDPC has a higher best accuracy than FedAvg"
        found.append(above("table2", claim, ours, [rows["fedavg"]], among=others))
    if DOUBLED in rows:
        for measure, words in (("best", "a higher best accuracy"), ("last10", "more over the last ten rounds")):
            claim = f"{here}, control: FedDPC has {words} than FedAvg with the server step doubled"
            found.append(above("table2", claim, ours, [rows[DOUBLED]], measure, among=others))
    return found


def _unless(absent: Sequence[str], *found: Finding) -> list[Finding]:
    """Return findings on all of some rows; what lacks a row cannot hold, however clear the others are."""
    if not absent:
        return list(found)
    note = f"; not run: {', '.join(absent)}"
    return [
        dataclasses.replace(
            f, numbers=f.numbers + note, verdict="cannot be told" if f.verdict == "holds" else f.verdict
        )
        for f in found
    ]


def _order(rows: Rows, alpha: float, study: Study) -> Finding:
    """Each pair of methods is a comparison: the one that the paper has higher should be higher."""
    reported = study.reported(alpha)
    names = sorted((n for n in published.METHODS if n in rows), key=lambda n: -reported[n].accuracy)
    pairs = [(rows[a], rows[b]) for a, b in combinations(names, 2)]
    asked = family([(b.line.label, paired(a.of("best"), b.of("best"))) for a, b in pairs])
    alike = sum(c.result.about.mean > 0 for c in asked)
    ours = sorted(names, key=lambda n: -statistics.fmean(rows[n].of("best").values()))
    return Finding(
        "table2",
        f"alpha {alpha:g}: the methods come in the paper's order of best accuracy",
        judge(asked),
        f"{alike} of {len(asked)} pairs are in that order; ours: {' > '.join(rows[n].line.label for n in ours)}",
        line=294,
    )


def _sooner(claim: str, ours: Row, rivals: Sequence[Row]) -> Finding:
    """A run that never gets to the rival's best accuracy is taken to get there one round after its end."""
    asked, words = [], []
    for rival in rivals:
        theirs = {seed: s for seed, s in rival.of("best_round").items() if seed in ours.scores}
        mine = {seed: float(rounds_to(ours.runs[seed].records, rival.scores[seed].best)) for seed in theirs}
        result = paired(theirs, mine)
        if result is not None:
            asked.append((rival.line.label, result))
            means = [statistics.fmean(v.values()) for v in (mine, theirs)]
            words.append(f"{means[0]:.0f} against {means[1]:.0f} of {rival.line.label}")
    return Finding("table2", claim, judge(family(asked)), "rounds: " + "; ".join(words), line=294)


def rounds_to(records: Sequence[dict[str, Any]], accuracy: float) -> int:
    """Return the first round with at least that test accuracy; one more than there are, if none has it.

    >>> rounds_to([{"test_accuracy": 0.1}, {"test_accuracy": None}, {"test_accuracy": 0.5}], 0.3)
    3
    """
    reached = (i for i, record in enumerate(records, start=1) if (record["test_accuracy"] or 0.0) >= accuracy)
    return next(reached, len(records) + 1)


def _quick(claim: str, ours: Row, rivals: Sequence[Row], at_once: int | None) -> Finding:
    """The time over the median of the others, seed by seed, should be below the bar: one slow hour decides nothing.

    Several runs ``at_once`` slow each other down by an unknown amount: then nothing is decided.
    """
    if at_once:
        shared = f"{at_once} runs at a time shared the machine, so their times say nothing about the method"
        return Finding("table2", claim, "cannot be told", shared, line=294)
    mine, ratios = ours.of("seconds"), {}
    for seed, seconds in mine.items():
        if others := [theirs[seed] for rival in rivals if seed in (theirs := rival.of("seconds"))]:
            ratios[seed] = seconds / statistics.median(others)
    result = paired(dict.fromkeys(ratios, COMPETITIVE), ratios)
    if result is None:
        return Finding("table2", claim, "cannot be told", "no seed in common", line=294)
    about = estimate(list(ratios.values()))
    spread = "" if about.spread is None else f" ± {about.spread:.2f}"
    numbers = f"{statistics.fmean(mine.values()):.3g} s, {about.mean:.2f}{spread} times the median of the others"
    return Finding(
        "table2", claim, judge(family([("bar", result)])), f"{numbers}; the bar is {COMPETITIVE:g}", line=294
    )


def _angle(claim: str, ours: Row) -> Finding:
    """The mean cosine over rounds, seed by seed, should be above zero."""
    cosines, factor = ours.of("cosine"), statistics.fmean(ours.of("scale").values())
    result = paired(cosines, dict.fromkeys(cosines, 0.0))
    assert result is not None
    spread = "" if result.about.spread is None else f" ± {result.about.spread:.3f}"
    numbers = f"mean cosine {result.about.mean:+.3f}{spread}; mean factor {factor:.3f}"
    return Finding("table2", claim, judge(family([("zero", result)])), numbers, line=185)


def _ablation(rows: Rows) -> list[Finding]:
    found = []
    for first, second, line in (
        ("no scaling", "neither", 307),
        ("feddpc", "no scaling", 307),
        ("feddpc", DOUBLED, None),
    ):
        if first in rows and second in rows:
            a, b = rows[first], rows[second]
            kind = "" if line else "control: "
            for measure, words in (
                ("mean", "raises test accuracy faster (mean over rounds) than"),
                ("loss", "lowers training loss faster (mean over rounds) than"),
                ("best", "has a higher best accuracy than"),
            ):
                claim = f"{kind}{a.line.label} {words} {b.line.label}"
                found.append(above("figure4", claim, a, [b], measure, line))
    return found


def _lambdas(rows: Rows) -> list[Finding]:
    tried = {lam: rows[name] for lam in published.LAMBDAS if (name := f"lambda {lam:g}") in rows}
    one, found = tried.get(1.0), []
    if one is not None and len(tried) > 1:
        others = [row for lam, row in tried.items() if lam != 1.0]
        absent = [f"lambda {lam:g}" for lam in published.LAMBDAS if lam not in tried]
        claim = "lambda = 1, which the paper takes, has the highest best accuracy"
        found += _unless(absent, above("figure5", claim, one, others, line=321))
    if 2.0 in tried and (low := [row for lam, row in tried.items() if lam <= 0.1]):
        claim = "lambda = 2 performs well: its best accuracy is above that of every lambda up to 0.1"
        found.append(above("figure5", claim, tried[2.0], low, line=321))
    for lam, row in tried.items():
        if lam < 0 and one is not None:
            others = [other for value, other in tried.items() if value != 1.0]
            found.append(_poorly(f"lambda = {lam:g} performs very poorly", row, one, line=321, among=others))
        if lam < 0 and 0.0 in tried:
            found.append(_poorly(f"control: accuracy breaks off below zero, at lambda = {lam:g}", row, tried[0.0]))
    for lam, row in tried.items():
        if (step := rows.get(f"step {1 + lam:g}")) is not None:
            claim = f"control: lambda = {lam:g} has a higher best accuracy than FedAvg with its step times {1 + lam:g}"
            found.append(above("figure5", claim, row, [step]))
    return found


def _poorly(claim: str, row: Row, better: Row, line: int | None = None, among: Sequence[Row] | None = None) -> Finding:
    """Judge "``row`` is far below ``better``"; the p that is shown is corrected for all rows ``among`` which it is."""
    words = f"{claim}: more than {100 * POORLY:g} points below {better.line.label}"
    shown = [c for c in contests(better, among or [row], "best") if c.rival == row.line.label]
    numbers = differences(shown, "best")
    return Finding("figure5", words, judge(contests(better, [row], "best", POORLY)), numbers, line)
