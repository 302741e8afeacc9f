"""The claims of the paper, each judged on our runs, and controls that the paper lacks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Sequence
from itertools import combinations

from feddpc.paper import published
from feddpc.paper.significance import Estimate, estimate, paired
from feddpc.paper.study import PaperRow, PaperStudy, accuracies
from feddpc.paper.study_spec import DOUBLED, label
from feddpc.paper.tuned import MOMENTUM
from feddpc.paper.verdicts import (
    Finding,
    PValues,
    above,
    compare,
    family,
    judge,
    p_values,
    show_differences,
    standing,
)
from feddpc.runs.stored import StoredRun

#: "Performs very poorly" is read as: farther below lambda = 1 than this.
POORLY = 0.05
#: "A competitive amount of time" is read as: below so many times the median of the other methods.
COMPETITIVE = 1.1
#: Where the paper makes its claims: line numbers of paper.tex.
_RESULTS, _ANGLE, _ABLATION, _LAMBDA = 294, 185, 307, 321
#: What figure 4 compares, with the line of the claim; the last is a control.
_ABLATED = (("no scaling", "neither", _ABLATION), ("feddpc", "no scaling", _ABLATION), ("feddpc", DOUBLED, None))

RowsByName = dict[str, PaperRow]


def findings(study: PaperStudy) -> list[Finding]:
    """Judge every claim for which the study has runs."""
    judged: list[Finding] = []
    for alpha in study.alphas("table2"):
        judged += _table2(study, alpha)
    for alpha in study.alphas("figure4"):
        judged += _ablation(study, alpha)
    for alpha in study.alphas("figure5"):
        judged += _lambdas(study, alpha)
    return judged


def corrected(study: PaperStudy, alpha: float, measure: str) -> PValues:
    """Return the p-value of every comparison on one measure: of Table 2, then of figure 4, then of figure 5."""
    ours, others = study.ours_and_rivals(alpha)
    if measure == "loss":
        others = [row for row in others if row.name in published.METHODS]
    table = [(ours, row) for row in others if measure != "mean"] if ours else []
    ablation, lambdas = study.scored("figure4", alpha), study.scored("figure5", alpha)
    figure4 = [(ablation[a], ablation[b]) for a, b, _ in _ABLATED if a in ablation and b in ablation]
    tried = _by_lambda(lambdas)
    steps = [(row, lambdas[step]) for lam, row in tried.items() if (step := f"step {1 + lam:g}") in lambdas]
    figure5 = [(tried[a], tried[b]) for a, b in _lambda_pairs(tried)] + steps
    return p_values([table, figure4, figure5 if measure == "best" else []], measure)


def summary(study: PaperStudy, parts: Sequence[str]) -> list[str]:
    """Return three lines: what FedDPC's best accuracy is above, what it is below, and what cannot be told.

    They are about Table 2, or, where that is not among ``parts``, about figures 4 and 5.
    """
    shown = [part for part in ("table2", "figure4", "figure5") if part in parts][: 1 if "table2" in parts else None]
    places: dict[str, list[str]] = {"above": [], "below": [], "not to be told from": []}
    for part in shown:
        for alpha in study.alphas(part):
            rows = study.scored(part, alpha)
            ours = rows.get("lambda 1" if part == "figure5" else "feddpc")
            rivals = [row for row in rows.values() if row is not ours and _compared(part, row.name)]
            if ours is None or not rivals:
                continue
            decided = standing(compare(ours, rivals, "best", known=corrected(study, alpha, "best")))
            for place, names in decided.items():
                if names:
                    places[place].append(f"alpha {alpha:g}: {' / '.join(names)}")
    lines = ("FedDPC is above", "FedDPC is below", "It cannot be told from")
    texts = ["; ".join(names) or "nothing" for names in places.values()]
    return [f"{line}: {text}" for line, text in zip(lines, texts, strict=True)] if any(places.values()) else []


def _compared(part: str, name: str) -> bool:
    """Whether a row is compared with FedDPC itself."""
    return part == "table2" or (part == "figure4" and name != "neither") or name.startswith("lambda")


def _table2(study: PaperStudy, alpha: float) -> list[Finding]:
    rows = study.scored("table2", alpha)
    ours = rows.get("feddpc")
    if ours is None:
        return []
    rivals = [rows[name] for name in published.METHODS if name in rows and name != "feddpc"]
    known = {measure: corrected(study, alpha, measure) for measure in ("best", "last10", "loss")}
    where, judged = f"alpha {alpha:g}", []
    if rivals:
        best = f"{where}: FedDPC has the highest best accuracy of the paper's methods"
        loss = f"{where}: FedDPC's training loss falls faster than that of the others (mean over rounds)"
        on_all = [
            above("table2", best, ours, rivals, line=_RESULTS, known=known["best"]),
            _order(rows, alpha, study, known["best"]),
            _fewer_rounds(f"{where}: FedDPC is at each rival's best accuracy in fewer rounds", ours, rivals),
            above("table2", loss, ours, rivals, "loss", _RESULTS, known["loss"]),
        ]
        judged += _unless_absent([label(name) for name in published.METHODS if name not in rows], on_all)
        time = f"{where}: FedDPC takes a competitive time per round"
        judged.append(_competitive_time(time, ours, rivals, study.origin.get("at_once")))
    if ours.values("cosine"):
        judged.append(_angle(f"{where}: updates lie at less than 90 degrees to the last global update", ours))
    for rival, measure, words in (
        ("fedavg", "best", "a higher best accuracy than FedAvg"),
        (DOUBLED, "best", "a higher best accuracy than FedAvg with the server step doubled"),
        ("fedavgm", "best", "a higher best accuracy than FedAvg with server momentum"),
        (MOMENTUM, "best", "a higher best accuracy than with its lambda and momentum tuned"),
        (DOUBLED, "last10", "more over the last ten rounds than FedAvg with the server step doubled"),
    ):
        if rival in rows:
            claim = f"{where}, control: FedDPC has {words}"
            judged.append(above("table2", claim, ours, [rows[rival]], measure, known=known[measure]))
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


def _order(rows: RowsByName, alpha: float, study: PaperStudy, known: PValues) -> Finding:
    """Each pair of methods is a comparison: the one that the paper has higher should be higher.

    Pairs with FedDPC have the p-values of Table 2; the others, which nothing else compares, are a family.
    """
    reported = study.reported(alpha)
    names = sorted((n for n in published.METHODS if n in rows), key=lambda n: -reported[n].accuracy)
    best = {name: rows[name].values("best") for name in names}
    both = list(combinations(names, 2))
    pairs = family([(rows[b].label, paired(best[a], best[b])) for a, b in both if "feddpc" not in (a, b)])
    for a, b in both:
        pairs += compare(rows[a], [rows[b]], "best", known=known) if "feddpc" in (a, b) else []
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


def _ablation(study: PaperStudy, alpha: float) -> list[Finding]:
    rows, judged = study.scored("figure4", alpha), []
    known = {measure: corrected(study, alpha, measure) for measure in ("mean", "loss", "best")}
    for first, second, line in _ABLATED:
        if first in rows and second in rows:
            a, b = rows[first], rows[second]
            kind = "" if line else "control: "
            for measure, words in (
                ("mean", "raises test accuracy faster (mean over rounds) than"),
                ("loss", "lowers training loss faster (mean over rounds) than"),
                ("best", "has a higher best accuracy than"),
            ):
                claim = f"{kind}{a.label} {words} {b.label}"
                judged.append(above("figure4", claim, a, [b], measure, line, known[measure]))
    return judged


def _by_lambda(rows: RowsByName) -> dict[float, PaperRow]:
    return {lam: rows[name] for lam in published.LAMBDAS if (name := f"lambda {lam:g}") in rows}


def _lambda_pairs(tried: Collection[float]) -> list[tuple[float, float]]:
    """Return which values of lambda are compared: 1 with all, 2 with those up to 0.1, 0 with those below it."""
    pairs = [(1.0, lam) for lam in tried if lam != 1.0]
    pairs += [(2.0, lam) for lam in tried if lam <= 0.1] + [(0.0, lam) for lam in tried if lam < 0]
    return [(a, b) for a, b in pairs if a in tried]


def _lambdas(study: PaperStudy, alpha: float) -> list[Finding]:
    rows, known = study.scored("figure5", alpha), corrected(study, alpha, "best")
    tried = _by_lambda(rows)
    others = [row for lam, row in tried.items() if lam != 1.0]
    one, judged = tried.get(1.0), []
    if one is not None and others:
        absent = [f"lambda {lam:g}" for lam in published.LAMBDAS if lam not in tried]
        claim = "lambda = 1, which the paper takes, has the highest best accuracy"
        judged += _unless_absent(absent, [above("figure5", claim, one, others, line=_LAMBDA, known=known)])
    if 2.0 in tried and (low := [row for lam, row in tried.items() if lam <= 0.1]):
        claim = "lambda = 2 performs well: its best accuracy is above that of every lambda up to 0.1"
        judged.append(above("figure5", claim, tried[2.0], low, line=_LAMBDA, known=known))
    for lam, row in tried.items():
        if lam < 0 and one is not None:
            judged.append(_poorly(f"lambda = {lam:g} performs very poorly", row, one, known, _LAMBDA))
        if lam < 0 and 0.0 in tried:
            claim = f"control: accuracy breaks off below zero, at lambda = {lam:g}"
            judged.append(_poorly(claim, row, tried[0.0], known, None))
    for lam, row in tried.items():
        if (step := rows.get(f"step {1 + lam:g}")) is not None:
            claim = f"control: lambda = {lam:g} has a higher best accuracy than FedAvg with its step times {1 + lam:g}"
            judged.append(above("figure5", claim, row, [step], known=known))
    return judged


def _poorly(claim: str, row: PaperRow, better: PaperRow, known: PValues, line: int | None) -> Finding:
    """Judge "``row`` is far below ``better``"; the p that is shown is that of the comparison without the margin."""
    claim = f"{claim}: more than {100 * POORLY:g} points below {better.label}"
    shown = compare(better, [row], "best", known=known)
    verdict = judge(compare(better, [row], "best", POORLY))
    return Finding("figure5", claim, verdict, show_differences(shown, "best"), line)
