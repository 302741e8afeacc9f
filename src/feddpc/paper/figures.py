"""The paper's figures, ours: curves in the style of the reports, with the paper's numbers next to them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.paper import published
from feddpc.paper.study import PaperRow, PaperStudy
from feddpc.report import figures as house
from feddpc.report.figures import GEOMETRY, TRAIN_LOSS, Panel, metric_panel
from feddpc.report.groups import SeedGroup
from feddpc.tasks.metrics import ACCURACY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

#: Color and dashes by label.
Style = dict[str, tuple[str, Any]]
RED, BLUE = "#cc3311", "#0077bb"
CURVES = (metric_panel(ACCURACY), TRAIN_LOSS)
_SIDE = 5.2  #: inches of one pair of axes


def available(study: PaperStudy, parts: Sequence[str]) -> dict[str, Callable[[], Figure]]:
    """Return a drawing function for each figure of ``parts`` that has runs, by name."""
    drawings: dict[str, Callable[[], Figure]] = {}
    if "table2" in parts and any(row.scores for row in study.part("table2")):
        drawings |= {"table2": partial(accuracies, study), "curves": partial(curves, study)}
        if _with_geometry(study):
            drawings["geometry"] = partial(geometry, study)
    for part, name, draw in (
        ("figure4", "ablation", ablation),
        ("figure5", "lambda", lambdas),
        ("figure5", "step", lambda_or_step),
    ):
        for alpha in study.alphas(part) if part in parts else ():
            if study.scored(part, alpha):
                drawings[f"{name}-alpha{alpha:g}"] = partial(draw, study, alpha)
    return drawings


def draw_all(study: PaperStudy, folder: Path, parts: Sequence[str]) -> list[Path]:
    """Draw all figures that have runs as PNG files, and return their paths."""
    paths = []
    for name, draw in available(study, parts).items():
        paths.append(folder / f"{name}.png")
        house.save(draw(), paths[-1])
    return paths


def curves(study: PaperStudy) -> Figure:
    """Draw figures 1 to 3: accuracy and loss over rounds, axes for each alpha; diamonds are the paper's best."""
    rows = {alpha: list(study.scored("table2", alpha).values()) for alpha in _scored_alphas(study)}
    style = _style([row.group for some in rows.values() for row in some])
    comparable = not study.short and study.data == study.paper_data
    marks = _line_marks(style)
    if comparable:
        marks["the paper's best"] = _mark(color="0.4", marker="D", linestyle="none")
    figure, grid = _figure(f"{study.title}: test accuracy and training loss", len(rows), len(CURVES), marks)
    for line, (alpha, some) in zip(grid, rows.items(), strict=True):
        _draw_panels(line, CURVES, [row.group for row in some], style, f"alpha {alpha:g}: ")
        if comparable:
            _diamonds(line[0], some, study.reported(alpha), style)
    return figure


def _diamonds(axes: Axes, rows: Sequence[PaperRow], reported: dict[str, published.Reported], style: Style) -> None:
    """Put the paper's best accuracies where it reached them."""
    for row in rows:
        if (theirs := reported.get(row.name)) is not None:
            color = style[row.label][0]
            axes.plot(theirs.round, theirs.accuracy, "D", color=color, markeredgecolor="white", markersize=7, zorder=6)


def accuracies(study: PaperStudy) -> Figure:
    """Draw Table 2: ours as a dot with its deviation and its seeds as small marks; the paper's as a diamond."""
    alphas = _scored_alphas(study)
    marks = {"ours: mean, deviation, seeds": _mark(color=BLUE, marker="o", linestyle="none")}
    if study.data == study.paper_data:  # accuracies on other data say nothing here
        marks["the paper's, one seed"] = _mark(color="white", marker="D", markeredgecolor="0.25", linestyle="none")
    height = 1.0 + 0.32 * max(len(study.part("table2", alpha)) for alpha in alphas)
    figure, grid = _figure(f"{study.title}: best test accuracy (%)", 1, len(alphas), marks, height)
    for axes, alpha in zip(grid[0], alphas, strict=True):
        rows = list(reversed(study.part("table2", alpha)))
        reported = study.reported(alpha) if len(marks) > 1 else {}
        for y, row in enumerate(rows):
            _dots(axes, y, row, reported.get(row.name))
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_title(f"alpha {alpha:g}", fontsize=10.5, loc="left")
        house.tidy(axes)
    return figure


def _dots(axes: Axes, y: int, row: PaperRow, theirs: published.Reported | None) -> None:
    color = RED if row.name == "feddpc" else BLUE
    if (about := row.estimate("best")) is not None:
        axes.plot([100 * v for v in row.values("best").values()], [y] * about.count, "|", color=color, alpha=0.6)
        spread = 100 * (about.spread or 0.0)
        axes.errorbar(100 * about.mean, y, xerr=spread, fmt="o", color=color, capsize=3, zorder=4)
    if theirs is not None:
        axes.plot(theirs.accuracy, y, "D", color="white", markeredgecolor="0.25", zorder=3)


def ablation(study: PaperStudy, alpha: float) -> Figure:
    """Draw figure 4: FedDPC, without scaling, without both, and the control."""
    return _draw_curves(
        f"{study.title}: ablation, alpha {alpha:g}", [row.group for row in study.scored("figure4", alpha).values()]
    )


def lambdas(study: PaperStudy, alpha: float) -> Figure:
    """Draw figure 5: test accuracy and loss over rounds for every lambda; lambda = 1 comes first and is red."""
    rows = [row for name, row in study.scored("figure5", alpha).items() if name.startswith("lambda")]
    rows.sort(key=lambda row: row.name != "lambda 1")
    return _draw_curves(f"{study.title}: FedDPC with other lambdas, alpha {alpha:g}", [row.group for row in rows])


def _draw_curves(title: str, groups: Sequence[SeedGroup], panels: Sequence[Panel] = CURVES) -> Figure:
    """Draw panels side by side, with one curve per group."""
    style = _style(groups)
    figure, grid = _figure(title, 1, len(panels), _line_marks(style))
    _draw_panels(grid[0], panels, groups, style)
    return figure


def geometry(study: PaperStudy) -> Figure:
    """Draw FedDPC's mean factor and cosine over rounds, a curve for each alpha; dashed: 1 + lambda, a right angle."""
    groups = [SeedGroup(f"FedDPC, alpha {row.alpha:g}", row.group.runs) for row in _with_geometry(study)]
    figure = _draw_curves(f"{study.title}: what FedDPC does to updates", groups, GEOMETRY)
    for axes, level in zip(figure.axes, (1 + published.LAMBDA, 0.0), strict=True):
        axes.axhline(level, color="0.4", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    return figure


def lambda_or_step(study: PaperStudy, alpha: float) -> Figure:
    """Draw the control of figure 5: accuracy against lambda, and against FedAvg's server step 1 + lambda."""
    rows = study.scored("figure5", alpha)
    lams = {1 + lam: rows[name] for lam in published.LAMBDAS if (name := f"lambda {lam:g}") in rows}
    steps = {1 + lam: rows[name] for lam in published.LAMBDAS if (name := f"step {1 + lam:g}") in rows}
    marks = {
        "FedDPC with lambda": _mark(color=RED, marker="o", linestyle="solid"),
        "FedAvg, step times 1 + lambda": _mark(color=BLUE, marker="s", linestyle="dashed"),
    }
    title = f"{study.title}: lambda, or just the server's step? alpha {alpha:g}"
    figure, grid = _figure(title, 1, 2, marks)
    for axes, measure, words in zip(grid[0], ("best", "last10"), ("best", "last 10 rounds"), strict=True):
        _against(axes, lams, measure, RED, "o-")
        _against(axes, steps, measure, BLUE, "s--")
        axes.set_title(f"test accuracy (%), {words}", fontsize=10.5, loc="left")
        axes.set_xlabel("1 + lambda, or the server's step over the clients'")
        house.tidy(axes)
    return figure


def _against(axes: Axes, rows: dict[float, PaperRow], measure: str, color: str, look: str) -> None:
    """Draw mean and deviation of a measure over ``rows`` by their place on the axis."""
    known = sorted((x, e.mean, e.spread or 0.0) for x, row in rows.items() if (e := row.estimate(measure)))
    x, mean, spread = ([100 * point[i] if i else point[i] for point in known] for i in range(3))
    axes.errorbar(x, mean, yerr=spread, fmt=look, color=color, capsize=3, markersize=5)


def _scored_alphas(study: PaperStudy) -> list[float]:
    """Return the alphas for which Table 2 has runs."""
    return [alpha for alpha in study.alphas("table2") if study.scored("table2", alpha)]


def _with_geometry(study: PaperStudy) -> list[PaperRow]:
    """Return FedDPC's rows of Table 2 that recorded what it did to updates."""
    return [row for row in study.part("table2") if row.name == "feddpc" and row.values("cosine")]


def _figure(title: str, lines: int, columns: int, marks: dict[str, Line2D], height: float = 2.9) -> tuple[Figure, Any]:
    """Return a figure with ``lines`` times ``columns`` axes, and one legend of ``marks`` below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, names = _SIDE * columns, list(marks)
    words, entries = textwrap.wrap(title, int(13 * width)), house.legend_columns(names, width)
    below = 0.22 * math.ceil(len(names) / entries)
    figure = Figure(figsize=(width, height * lines + 0.3 + 0.2 * len(words) + below), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(words), fontsize=11, x=0.01, ha="left")
    house.add_legend(figure, list(marks.values()), names, entries)
    return figure, figure.subplots(lines, columns, squeeze=False)


def _style(groups: Sequence[SeedGroup]) -> Style:
    """Return the color and dashes of each label; the first FedDPC is red."""
    one_each = {group.label: group for group in groups}
    return dict(zip(one_each, house.styles(list(one_each.values())), strict=True))


def _draw_panels(
    line: Sequence[Axes], panels: Sequence[Panel], groups: Sequence[SeedGroup], style: Style, before: str = ""
) -> None:
    """Draw the panels side by side, their titles after ``before``."""
    for axes, panel in zip(line, panels, strict=True):
        house.draw_panel(axes, replace(panel, title=before + panel.title), groups, style)


def _line_marks(style: Style) -> dict[str, Line2D]:
    """Return the legend entries of curves."""
    return {name: _mark(color=color, linestyle=dashes, linewidth=2) for name, (color, dashes) in style.items()}


def _mark(**look: Any) -> Line2D:
    """Return a legend entry."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)
