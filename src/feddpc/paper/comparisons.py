"""FedDPC against every other row of Table 2, seed by seed, with two tests."""

from __future__ import annotations

from collections.abc import Sequence

from feddpc.paper.sheet import Sheet
from feddpc.paper.statistics import LEVEL, Estimate, Paired, corrected, paired, seeds_for, smallest_flip
from feddpc.paper.study import Study
from feddpc.paper.verdicts import show_p

_MEASURES = {"best": "best", "last10": "last 10"}


def comparisons(study: Study, alpha: float) -> Sheet | None:
    """Return the table of one alpha, in points of accuracy; None if FedDPC has no run, or nobody else."""
    ours = study.find("table2", alpha, "feddpc")
    rivals = [row for row in study.part("table2", alpha) if row is not ours]
    if ours is None or not rivals:
        return None
    columns = [_column([paired(ours.of(m), rival.of(m)) for rival in rivals]) for m in _MEASURES]
    cells = [[rival.line.label, *(cell for column in columns for cell in column[i])] for i, rival in enumerate(rivals)]
    headings = [text for name in _MEASURES.values() for text in (name, "95 % interval", "p, t", "p, flips")]
    return Sheet(
        f"comparisons-alpha{alpha:g}",
        f"FedDPC minus the others, points of accuracy, {study.title}, alpha {alpha:g}",
        ("FedDPC minus", *headings),
        cells,
        [_explained(len(ours.scores), len(rivals))],
    )


def _explained(seeds: int, asked: int) -> str:
    if seeds < 2:
        return "One seed: nothing can be tested."
    return (
        f"Paired over {seeds} seeds. p is two-sided, of the paired t test and of the exact sign-flip test, after "
        f"Holm's correction for {asked} comparisons. With {seeds} seeds the sign-flip test cannot give less than "
        f"{smallest_flip(seeds):g} before the correction; to get to {LEVEL:g} after it takes {seeds_for(asked)} seeds."
    )


def _column(results: Sequence[Paired | None]) -> list[list[str]]:
    """Return the four cells of every comparison; those with too few seeds are not corrected for."""
    by_t, by_flip = (corrected([getattr(r, test, None) for r in results]) for test in ("t", "flip"))
    return [
        ["-"] * 4 if r is None else [f"{100 * r.about.mean:+.2f}", interval(r.about, "+"), show_p(t), show_p(flip)]
        for r, t, flip in zip(results, by_t, by_flip, strict=True)
    ]


def interval(about: Estimate, sign: str = "") -> str:
    """Return an interval in percent.

    >>> interval(Estimate(0.5, 0.1, 0.45, 0.55, 3)), interval(Estimate(0.5, None, None, None, 1))
    ('45.00 to 55.00', '-')
    """
    if about.low is None or about.high is None:
        return "-"
    return f"{100 * about.low:{sign}.2f} to {100 * about.high:{sign}.2f}"
