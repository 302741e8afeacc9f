"""FedDPC against every other row of Table 2, seed by seed."""

from __future__ import annotations

from feddpc.paper.statistics import Estimate
from feddpc.paper.study import Study
from feddpc.paper.verdicts import contests, show_p
from feddpc.report.table import Table

_MEASURES = {"best": "best", "last10": "last 10"}


def comparisons(study: Study, alpha: float) -> Table | None:
    """Return the table of one alpha, in points of accuracy; None if FedDPC or all other rows lack runs."""
    ours = study.find("table2", alpha, "feddpc")
    rivals = [row for row in study.part("table2", alpha) if row is not ours]
    if ours is None or not rivals:
        return None
    columns = [{c.rival: c for c in contests(ours, rivals, measure)} for measure in _MEASURES]
    rows = []
    for rival in rivals:
        cells = [rival.line.label]
        for column in columns:
            contest = column.get(rival.line.label)
            about = contest.result.about if contest else None
            cells += (
                [f"{100 * about.mean:+.2f}", interval(about, "+"), show_p(contest.p)]
                if contest and about
                else ["-"] * 3
            )
        rows.append(cells)
    headings = [text for name in _MEASURES.values() for text in (name, "95 % interval", "p")]
    seeds = len(ours.scores)
    note = (
        f"Paired over {seeds} seeds. p is two-sided, of the paired t test, after Holm's correction for {len(rivals)} "
        "comparisons; the findings have the same p."
    )
    return Table(
        f"comparisons-alpha{alpha:g}",
        f"FedDPC minus the others, points of accuracy, {study.title}, alpha {alpha:g}",
        ("FedDPC minus", *headings),
        rows,
        [note if seeds > 1 else "One seed: nothing can be tested."],
    )


def interval(about: Estimate, sign: str = "") -> str:
    """Return an interval in percent.

    >>> interval(Estimate(0.5, 0.1, 0.45, 0.55, 3)), interval(Estimate(0.5, None, None, None, 1))
    ('45.00 to 55.00', '-')
    """
    if about.low is None or about.high is None:
        return "-"
    return f"{100 * about.low:{sign}.2f} to {100 * about.high:{sign}.2f}"
