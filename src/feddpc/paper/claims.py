"""The claims of the paper, each judged on our runs, and controls that the paper lacks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from itertools import combinations

from feddpc.paper import published
from feddpc.paper.significance import Estimate, estimate, paired
from feddpc.paper.study import PaperRow, PaperStudy, accuracies
from feddpc.paper.study_spec import DOUBLED, label
from feddpc.paper.verdicts import Finding, above, compare, family, judge, show_differences
from feddpc.runs.stored import StoredRun

#: "Performs very poorly" is read as: farther below lambda = 1 than this.
POORLY = 0.05
#: "A competitive amount of time" is read as: below so many times the median of the other methods.
COMPETITIVE = 1.1
#: Where the paper makes its claims: line numbers of paper.tex.
_RESULTS, _ANGLE, _ABLATION, _LAMBDA = 294, 185, 307, 321

RowsByName = dict[str, PaperRow]


def findings(study: PaperStudy) -> list[Finding]:
    """Judge every claim for which the study has runs."""
    judged: list[Finding] = []
    for alpha in study.alphas("table2"):
        judged += _table2(study, alpha)
    for alpha in study.alphas("figure4"):
        judged += _ablation(study.scored("figure4", alpha))
    for alpha in study.alphas("figure5"):
        judged += _lambdas(study.scored("figure5", alpha))
    return judged


def _table2(study: PaperStudy, alpha: float) -> list[Finding]:
    rows = study.scored("table2", alpha)
    ours = rows.get("feddpc")
    if ours is None:
        return []
    rivals = [rows[name] for name in published.METHODS if name in rows and name != "feddpc"]
    others = [row for row in study.part("table2", alpha) if row is not ours]  # the family of the table of differences
    where, judged = f"alpha {alpha:g}", []
    if rivals:
        best = f"{where}: FedDPC has the highest best accuracy of the paper's methods"
        loss = f"{where}: FedDPC's training loss falls faster than that of the others (mean over rounds)"
        on_all = [
            above("table2", best, ours, rivals, line=_RESULTS, among=others),
            _order(rows, alpha, study),
            _fewer_rounds(f"{where}: FedDPC is at each rival's best accuracy in fewer rounds", ours, rivals),
            above("table2", loss, ours, rivals, "loss", line=_RESULTS),
        ]
        judged += _unless_absent([label(name) for name in published.METHODS if name not in rows], on_all)
        time = f"{where}: FedDPC takes a competitive time per round"
        judged.append(_competitive_time(time, ours, rivals, study.origin.get("at_once")))
    if ours.values("cosine"):
        judged.append(_angle(f"{where}: updates lie at less than 90 degrees to the last global update", ours))
    for rival, measure, words in (
        ("fedavg", "best", "a higher best accuracy than FedAvg"),
        (DOUBLED, "best", "a higher best accuracy than FedAvg with the server step doubled"),
        (DOUBLED, "last10", "more over the last ten rounds than FedAvg with the server step doubled"),
    ):
        if rival in rows:
            claim = f"{where}, control: FedDPC has {words}"
            judged.append(above("table2", claim, ours, [rows[rival]], measure, among=others))
    return judged


def _unless_absent(absent: Sequence[str], judged: Sequence[Finding]) -> list[Finding]:
    """Return findings on all rows of a kind; if rows are absent, no such claim can hold."""
    if not absent:
        return list(judged)
    return [
        dataclasses.replace(
            finding,
            numbers=f"{finding.numbers}; not run: {', '.join(absent)}",
            verdict="cannot be told" if finding.verdict == "holds" else finding.verdict,
        )
        for finding in judged
    ]


def _order(rows: RowsByName, alpha: float, study: PaperStudy) -> Finding:
    """Each pair of methods is a comparison: the one that the paper has higher should be higher."""
    reported = study.reported(alpha)
    names = sorted((n for n in published.METHODS if n in rows), key=lambda n: -reported[n].accuracy)
    best = {name: rows[name].values("best") for name in names}
    pairs = family([(rows[b].label, paired(best[a], best[b])) for a, b in combinations(names, 2)])
    alike = sum(pair.difference.mean > 0 for pair in pairs)
    ours = sorted(names, key=lambda n: -statistics.fmean(best[n].values()))
    return Finding(
        "table2",
        f"alpha {alpha:g}: the methods come in the paper's order of best accuracy",
        judge(pairs),
        f"{alike} of {len(pairs)} pairs are in that order; ours: {' > '.join(rows[n].label for n in ours)}",
        _RESULTS,
    )


def _fewer_rounds(claim: str, ours: PaperRow, rivals: Sequence[PaperRow]) -> Finding:
    """Compare rounds to a rival's best accuracy; a run that never reaches it counts as its length plus one."""
    differences, words = [], []
    for rival in rivals:
        theirs = {seed: v for seed, v in rival.values("best_round").items() if seed in ours.scores}
        mine = {seed: float(rounds_to(ours.runs[seed], rival.scores[seed]["best"])) for seed in theirs}
        if theirs:
            differences.append((rival.label, paired(theirs, mine)))
            means = [statistics.fmean(rounds.values()) for rounds in (mine, theirs)]
            words.append(f"{means[0]:.0f} against {means[1]:.0f} of {rival.label}")
    return Finding("table2", claim, judge(family(differences)), "rounds: " + "; ".join(words), _RESULTS)


def rounds_to(run: StoredRun, accuracy: float) -> int:
    """Return the first round with at least that test accuracy; the number of rounds plus one if none has it."""
    reached = (i for i, known in enumerate(accuracies(run), start=1) if (known or 0.0) >= accuracy)
    return next(reached, len(run.records) + 1)


def _competitive_time(claim: str, ours: PaperRow, rivals: Sequence[PaperRow], at_once: int | None) -> Finding:
    """The time over the median of the others, seed by seed, should be below the bar: one slow hour decides nothing.

    Several runs ``at_once`` slow each other down by an unknown amount: then nothing is decided.
    """
    if at_once:
        shared = f"{at_once} runs at a time shared the machine, so their times say nothing about the method"
        return Finding("table2", claim, "cannot be told", shared, _RESULTS)
    mine, theirs = ours.values("seconds"), [rival.values("seconds") for rival in rivals]
    others = {seed: [seconds[seed] for seconds in theirs if seed in seconds] for seed in mine}
    ratios = {seed: mine[seed] / statistics.median(known) for seed, known in others.items() if known}
    if not ratios:
        return Finding("table2", claim, "cannot be told", "no seed in common", _RESULTS)
    bar = family([("bar", paired(dict.fromkeys(ratios, COMPETITIVE), ratios))])
    ratio = _with_spread(estimate(list(ratios.values())), ".2f")
    numbers = f"{statistics.fmean(mine.values()):.3g} s, {ratio} times the median of the others"
    return Finding("table2", claim, judge(bar), f"{numbers}; the bar is {COMPETITIVE:g}", _RESULTS)


def _angle(claim: str, ours: PaperRow) -> Finding:
    """The mean cosine over rounds, seed by seed, should be above zero."""
    cosine = estimate(list(ours.values("cosine").values()))
    factor = statistics.fmean(ours.values("scale").values())
    numbers = f"mean cosine {_with_spread(cosine, '+.3f')}; mean factor {factor:.3f}"
    return Finding("table2", claim, judge(family([("zero", cosine)])), numbers, _ANGLE)


def _with_spread(about: Estimate, digits: str) -> str:
    """Return a mean with its spread, if it has one."""
    spread = "" if about.spread is None else f" ± {about.spread:{digits.removeprefix('+')}}"
    return f"{about.mean:{digits}}{spread}"


def _ablation(rows: RowsByName) -> list[Finding]:
    judged = []
    for first, second, line in (
        ("no scaling", "neither", _ABLATION),
        ("feddpc", "no scaling", _ABLATION),
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
                judged.append(above("figure4", f"{kind}{a.label} {words} {b.label}", a, [b], measure, line))
    return judged


def _lambdas(rows: RowsByName) -> list[Finding]:
    tried = {lam: rows[name] for lam in published.LAMBDAS if (name := f"lambda {lam:g}") in rows}
    others = [row for lam, row in tried.items() if lam != 1.0]
    one, judged = tried.get(1.0), []
    if one is not None and others:
        absent = [f"lambda {lam:g}" for lam in published.LAMBDAS if lam not in tried]
        claim = "lambda = 1, which the paper takes, has the highest best accuracy"
        judged += _unless_absent(absent, [above("figure5", claim, one, others, line=_LAMBDA)])
    if 2.0 in tried and (low := [row for lam, row in tried.items() if lam <= 0.1]):
        claim = "lambda = 2 performs well: its best accuracy is above that of every lambda up to 0.1"
        judged.append(above("figure5", claim, tried[2.0], low, line=_LAMBDA))
    for lam, row in tried.items():
        if lam < 0 and one is not None:
            judged.append(_poorly(f"lambda = {lam:g} performs very poorly", row, one, others, _LAMBDA))
        if lam < 0 and 0.0 in tried:
            claim = f"control: accuracy breaks off below zero, at lambda = {lam:g}"
            judged.append(_poorly(claim, row, tried[0.0], [row], None))
    for lam, row in tried.items():
        if (step := rows.get(f"step {1 + lam:g}")) is not None:
            claim = f"control: lambda = {lam:g} has a higher best accuracy than FedAvg with its step times {1 + lam:g}"
            judged.append(above("figure5", claim, row, [step]))
    return judged


def _poorly(claim: str, row: PaperRow, better: PaperRow, among: Sequence[PaperRow], line: int | None) -> Finding:
    """Judge "``row`` is far below ``better``"; the p that is shown is corrected for all rows ``among`` which it is."""
    claim = f"{claim}: more than {100 * POORLY:g} points below {better.label}"
    shown = [c for c in compare(better, among, "best") if c.rival == row.label]
    verdict = judge(compare(better, [row], "best", POORLY))
    return Finding("figure5", claim, verdict, show_differences(shown, "best"), line)
