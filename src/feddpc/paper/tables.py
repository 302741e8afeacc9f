"""Table 2 and its differences, the accuracies of figures 4 and 5, the grid's winners, and the findings."""

from __future__ import annotations

from collections.abc import Sequence

from feddpc.data.specs import spec
from feddpc.paper import published
from feddpc.paper.significance import Estimate
from feddpc.paper.study import PaperRow, PaperStudy
from feddpc.paper.study_spec import CONTROLS, HELD_OUT, ROWS, label
from feddpc.paper.tuned import base_name, setting_of, winners
from feddpc.paper.verdicts import Finding, compare, show_p
from feddpc.report.groups import show
from feddpc.report.table import Table, percent
from feddpc.study.choose import SCATTER

#: What one row achieved, and the same with the paper's numbers in between.
_OURS = ("best %", "95 % interval", "round", "last 10 %", "s/round")
_BOTH = ("best %", "95 % interval", "paper %", "round", "paper's", "last 10 %", "s/round", "paper's s")
#: The accuracy, in multiples of what guessing gives, below which a grid has hardly begun to tell settings apart.
_BEGUN = 4
_CHOICES = ("best on test", "test %", "best on validation", "test % there")
_MEASURES = {"best": "best", "last10": "last 10"}
_TITLES = {"figure4": "Figure 4, ablation", "figure5": "Figure 5, lambda"}


def of_part(study: PaperStudy, part: str) -> list[Table]:
    """Return the tables of a part."""
    tables: list[Table | None] = []
    for alpha in study.alphas(part):
        if part == "grid":
            tables.append(grid(study, alpha))
        elif part == "table2":
            tables += [table2(study, alpha), differences(study, alpha)]
        else:
            tables.append(figure(study, part, alpha))
    return [table for table in tables if table is not None]


def table2(study: PaperStudy, alpha: float) -> Table:
    """Return Table 2 of one alpha: ours, mean ± deviation over seeds, next to the paper's."""
    rows, cells = study.part("table2", alpha), []
    reported, seconds = study.reported(alpha), published.SECONDS[study.paper_data]
    for row in rows:
        values = _results(row) | dict.fromkeys(("paper %", "paper's", "paper's s"), "-")
        if cell := reported.get(row.name):
            values |= {"paper %": f"{cell.accuracy:.2f}", "paper's": str(cell.round)}
            values["paper's s"] = f"{seconds[row.name]:.2f}"
        cells.append([row.label, setting(row), str(len(row.scores)), *(values[heading] for heading in _BOTH)])
    return Table(
        f"table2-alpha{alpha:g}",
        f"Table 2, {study.title}, alpha {alpha:g}",
        ("method", "setting", "seeds", *_BOTH),
        cells,
        [*_explanations(study, alpha), *_gaps(rows)],
        _best(rows),
        frozenset({"setting"}),
    )


def cells(studies: Sequence[PaperStudy]) -> Table:
    """Return the best accuracies of all methods on the paper's data sets, ours beside the paper's, in one table."""
    columns = [(s, alpha) for s in studies if s.data == s.paper_data for alpha in s.alphas("table2")]
    texts = {label(name): [label(name)] for name in ROWS}
    for study, alpha in columns:
        rows, reported = study.scored("table2", alpha), study.reported(alpha)
        for name in ROWS:
            about = rows[name].estimate("best") if name in rows else None
            seeds = f" ({about.count})" if about else ""
            own = percent(about.mean, about.spread) if about else "-"
            paper = f"{reported[name].accuracy:.2f}" if name in reported else "-"
            texts[label(name)] += [f"{own}{seeds}", paper]
    headings = [f"{published.TITLES[s.data]}{'*' if s.short else ''}, {alpha:g}" for s, alpha in columns]
    return Table(
        "cells",
        "Best test accuracy in percent, mean ± standard deviation (seeds), and the paper's",
        ("method", *(text for heading in headings for text in (heading, "paper"))),
        list(texts.values()),
        ["The number after a data set is alpha. An asterisk: shortened, so not comparable with the paper's column."],
    )


def differences(study: PaperStudy, alpha: float) -> Table | None:
    """Return how far FedDPC is above each other row, in points; None if FedDPC or all other rows lack runs."""
    ours, rivals = study.ours_and_rivals(alpha)
    if ours is None or not rivals:
        return None
    rows = {rival.label: [rival.label] for rival in rivals}
    for measure in _MEASURES:
        known = {comparison.rival: comparison for comparison in compare(ours, rivals, measure)}
        for name, cells in rows.items():
            if comparison := known.get(name):
                about = comparison.difference
                cells += [f"{100 * about.mean:+.2f}", interval(about, "+"), show_p(comparison.p)]
            else:
                cells += ["-"] * 3
    headings = [text for name in _MEASURES.values() for text in (name, "95 % interval", "p")]
    seeds = len(ours.scores)
    note = (
        f"Paired over {seeds} seeds. p is two-sided, of the paired t test, after Holm's correction for the "
        f"{len(rivals)} rows of this table; the findings have the same p."
    )
    return Table(
        f"comparisons-alpha{alpha:g}",
        f"FedDPC minus the others, points of accuracy, {study.title}, alpha {alpha:g}",
        ("FedDPC minus", *headings),
        list(rows.values()),
        [note if seeds > 1 else "One seed: nothing can be tested."],
    )


def interval(about: Estimate, sign: str = "") -> str:
    """Return an interval in percent.

    >>> interval(Estimate(0.5, 3, 0.1, 0.45, 0.55)), interval(Estimate(0.5))
    ('45.00 to 55.00', '-')
    """
    if about.low is None or about.high is None:
        return "-"
    return f"{100 * about.low:{sign}.2f} to {100 * about.high:{sign}.2f}"


def figure(study: PaperStudy, part: str, alpha: float) -> Table:
    """Return the accuracies of figure 4 or 5, for which the paper gives curves only."""
    rows = study.part(part, alpha)
    rates = ", ".join(dict.fromkeys(show(row.config.lr) for row in rows))
    return Table(
        f"{part}-alpha{alpha:g}",
        f"{_TITLES[part]}, {study.title}, alpha {alpha:g}, rate {rates}",
        ("row", "seeds", *_OURS),
        [[row.label, str(len(row.scores)), *_results(row).values()] for row in rows],
        ["The paper shows this as curves only and gives no numbers.", *_gaps(rows)],
        _best(rows),
    )


def _results(row: PaperRow) -> dict[str, str]:
    """Return the results of a row, by heading."""
    best, at, last, spent = (row.estimate(m) for m in ("best", "best_round", "last10", "seconds"))
    if best is None or at is None or last is None or spent is None:
        return dict.fromkeys(_OURS, "-")
    texts = (percent(best.mean, best.spread), interval(best), f"{at.mean:.0f}", percent(last.mean, last.spread))
    return dict(zip(_OURS, (*texts, f"{spent.mean:.3g}"), strict=True))


def setting(row: PaperRow) -> str:
    """Return the tuned setting of a row: rates, and the hyper-parameter of the paper's grid."""
    tuned = setting_of(row)
    words = {"lr": tuned.lr, **tuned.hyper}
    if row.config.server_lr != row.config.lr:
        words["server lr"] = row.config.server_lr
    return ", ".join(f"{k} {show(v)}" for k, v in words.items())


def _best(rows: Sequence[PaperRow]) -> frozenset[int]:
    means = {i: about.mean for i, row in enumerate(rows) if (about := row.estimate("best"))}
    return frozenset(i for i, mean in means.items() if mean == max(means.values()))


def _explanations(study: PaperStudy, alpha: float) -> list[str]:
    """Return the notes that explain the columns, and where the paper's cannot be compared with ours."""
    controls = [f"'{label(name)}'" for name in CONTROLS if any(row.name == name for row in study.part("table2", alpha))]
    kind = "a control" if len(controls) == 1 else "controls"
    lacks = f" {' and '.join(controls)}: {kind}, which the paper lacks." if controls else ""
    notes = [
        "Best: highest test accuracy of any round, mean ± standard deviation over seeds, t interval of the mean. "
        f"Settings: {study.origin.get('settings', 'unknown')}.{lacks}"
    ]
    if study.data != study.paper_data:
        other = published.TITLES[study.paper_data]
        notes.append(
            f"The paper has no {study.data}: its columns are of {other}, to compare the order, not the values."
        )
    if (study.paper_data, alpha) not in published.TABLE2:
        notes.append(f"The paper has no alpha {alpha:g}: its columns are of alpha {published.ALPHAS[0]:g}.")
    if study.short:
        notes.append(f"Shortened: {study.short}. The paper's columns are of its whole experiment.")
    if apart := [row.label for row in study.part("table2", alpha) if _scatters(row, "best")]:
        notes.append(f"Seeds scatter, standard deviation above {100 * SCATTER:g} points: {', '.join(apart)}.")
    if hardly_begun(study, alpha):
        notes.append("The tuning behind these settings had hardly begun to learn: they say little of the methods.")
    return notes


def _gaps(rows: Sequence[PaperRow]) -> list[str]:
    """Say which runs are missing, and which diverged."""
    notes = []
    for word in ("missing", "diverged"):
        seeds = [(row.label, ", ".join(map(str, getattr(row, word)))) for row in rows]
        if where := [f"{name} (seed {numbers})" for name, numbers in seeds if numbers]:
            notes.append(f"{word.capitalize()}: {'; '.join(where)}.")
    return notes


def grid(study: PaperStudy, alpha: float) -> Table:
    """Return the winners of the grid: chosen on the test set, as the paper did, and on held-out samples."""
    rows, cells = study.part("grid", alpha), []
    for name, chosen in winners(rows).items():
        tried = [row for row in rows if base_name(row) == name]
        last = max(row.config.rounds for row in tried)
        ended = [row for row in tried if not row.missing]
        counts = (len(ended), sum(row.config.rounds == last for row in ended), sum(bool(r.diverged) for r in tried))
        line = [label(name), *map(str, counts)]
        for selection, measure in (("test", "best"), ("validation", "validated")):
            row = chosen.get(selection)
            about = row and row.estimate(measure)
            line += [setting(row), percent(about.mean, about.spread)] if row and about else ["-", "-"]
        cells.append(line)
    lengths = sorted({row.config.rounds for row in rows})
    rounds = ", ".join(map(str, lengths))
    climbed = f" Only settings that ran to the end, {lengths[-1]} rounds, can win." if len(lengths) > 1 else ""
    note = (
        f"Runs of {rounds} rounds; {_tried(rows)}.{climbed} Best on test, as the paper chose: the highest test "
        f"accuracy of any round. Best on validation: setting and round are chosen on {100 * HELD_OUT:g} % of the "
        "training set that is held out of training; the test accuracy is that of this round. A setting that diverged "
        "is not chosen."
    )
    return Table(
        f"grid-alpha{alpha:g}",
        f"Tuning, {study.title}, alpha {alpha:g}",
        ("method", "settings", "to the end", "diverged", *_CHOICES),
        cells,
        [note, *_cautions(study, alpha), *_gaps([row for row in rows if row.missing])],
        text_columns=frozenset({"best on test", "best on validation"}),
    )


def _tried(rows: Sequence[PaperRow]) -> str:
    """Say which rates and which values of the second hyper-parameter a grid has."""
    tried: dict[str, None] = {}
    values: set[float] = set()
    for row in rows:
        hyper = setting_of(row).hyper
        tried |= dict.fromkeys(hyper)
        values |= set(map(float, hyper.values()))
    rates = sorted({row.config.lr for row in rows}, reverse=True)
    second = f"; {', '.join(tried)}: {', '.join(map(show, sorted(values, reverse=True)))}" if values else ""
    return f"rates: {', '.join(map(show, rates))}{second}"


def _cautions(study: PaperStudy, alpha: float) -> list[str]:
    """Return notes on what a grid of few rounds or few rates cannot decide."""
    rows, notes = study.part("grid", alpha), []
    whole = max((row.config.rounds for row in study.part("table2", alpha)), default=0)
    if max((row.config.rounds for row in rows), default=whole) < whole:
        notes.append(f"The table has runs of {whole} rounds: a setting that is best early need not be the best then.")
    best = {name: chosen["validation"] for name, chosen in winners(rows).items() if "validation" in chosen}
    for end, word in ((min, "lowest"), (max, "highest")):
        ends = {name: end(row.config.lr for row in rows if base_name(row) == name) for name in best}
        if at_end := [label(name) for name, row in best.items() if row.config.lr == ends[name]]:
            notes.append(f"Best on validation at the {word} rate that was tried: {', '.join(at_end)}.")
    if apart := [label(name) for name, row in best.items() if _scatters(row, "validation")]:
        notes.append(f"The seeds scatter by more than {100 * SCATTER:g} points at the winner of {', '.join(apart)}.")
    if names := hardly_begun(study, alpha):
        notes.append(
            f"Less than {_BEGUN} times what guessing gives ({percent(1 / spec(study.data).classes)} %): "
            f"{', '.join(names)}. So early a ladder can hardly tell rates apart, and the table may be far from what "
            "these methods can do."
        )
    return notes


def _scatters(row: PaperRow, measure: str) -> bool:
    """Whether the seeds of a row are far apart."""
    about = row.estimate(measure)
    return about is not None and about.spread is not None and about.spread > SCATTER


def hardly_begun(study: PaperStudy, alpha: float) -> list[str]:
    """Return the methods whose best run of the grid is hardly above guessing, so that nothing could be chosen."""
    names, bar = [], _BEGUN / spec(study.data).classes
    for name, chosen in winners(study.part("grid", alpha)).items():
        about = chosen["test"].estimate("best") if "test" in chosen else None
        if about is not None and about.mean < bar:
            names.append(label(name))
    return names


def findings(judged: Sequence[Finding], title: str) -> Table:
    """Return the findings: claim, verdict, numbers."""
    return Table(
        "findings",
        f"What holds, {title}",
        ("claim", "verdict", "numbers", "line in paper.tex"),
        [[f.claim, f.verdict, f.numbers, "-" if f.line is None else str(f.line)] for f in judged],
        text_columns=frozenset({"verdict", "numbers"}),
    )
