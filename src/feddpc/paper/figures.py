"""The paper's figures, ours: curves in the style of the reports, with the paper's numbers next to them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.paper import published
from feddpc.paper.study import Row, Study
from feddpc.report import figures as house
from feddpc.report.figures import GEOMETRY, TRAIN_LOSS, Panel, metric_panel
from feddpc.report.groups import Group
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


def available(study: Study, parts: Sequence[str]) -> dict[str, Callable[[], Figure]]:
    """Return what draws each figure of ``parts`` for which there are runs, by name."""
    found: dict[str, Callable[[], Figure]] = {}
    if "table2" in parts and any(row.scores for row in study.part("table2")):
        found |= {"table2": lambda: accuracies(study), "curves": lambda: curves(study)}
        if _turned(study):
            found["geometry"] = lambda: geometry(study)
    for alpha in study.alphas("figure4") if "figure4" in parts else ():
        if _there(study, "figure4", alpha):
            found[f"ablation-alpha{alpha:g}"] = partial(ablation, study, alpha)
    for alpha in study.alphas("figure5") if "figure5" in parts else ():
        if _there(study, "figure5", alpha):
            found[f"lambda-alpha{alpha:g}"] = partial(lambdas, study, alpha)
            found[f"step-alpha{alpha:g}"] = partial(lambda_or_step, study, alpha)
    return found


def draw_all(study: Study, folder: Path, parts: Sequence[str]) -> list[Path]:
    """Draw all figures that there are as PNG files, and return their paths."""
    paths = []
    for name, draw in available(study, parts).items():
        paths.append(folder / f"{name}.png")
        house.save(draw(), paths[-1])
    return paths


def curves(study: Study) -> Figure:
    """Draw figures 1 to 3: accuracy and loss over rounds, axes for each alpha; diamonds are the paper's best."""
    rows = {alpha: some for alpha in study.alphas("table2") if (some := _there(study, "table2", alpha))}
    style = style_of([row.group for some in rows.values() for row in some])
    comparable = not study.short and study.data == study.paper_data
    diamond = {"the paper's best": mark(color="0.4", marker="D", linestyle="none")} if comparable else {}
    title = f"{study.title}: test accuracy and training loss"
    figure, grid = axes_for(title, len(rows), len(CURVES), [*style, *diamond])
    for line, (alpha, some) in zip(grid, rows.items(), strict=True):
        curves_on(line, CURVES, [row.group for row in some], style, f"alpha {alpha:g}: ")
        if comparable:
            _diamonds(line[0], some, study.reported(alpha), style)
    legend(figure, style, diamond)
    return figure


def _diamonds(axes: Axes, rows: Sequence[Row], reported: dict[str, published.Reported], style: Style) -> None:
    """Put the paper's best accuracies where it reached them."""
    for row in rows:
        if (theirs := reported.get(row.line.name)) is not None:
            color = style[row.line.label][0]
            axes.plot(theirs.round, theirs.accuracy, "D", color=color, markeredgecolor="white", markersize=7, zorder=6)


def accuracies(study: Study) -> Figure:
    """Draw Table 2: ours as a dot with its deviation and its seeds as small marks; the paper's as a diamond."""
    alphas = [alpha for alpha in study.alphas("table2") if _there(study, "table2", alpha)]
    marks = {"ours: mean, deviation, seeds": mark(color=BLUE, marker="o", linestyle="none")}
    if study.data == study.paper_data:  # accuracies on other data say nothing here
        marks["the paper's, one seed"] = mark(color="white", marker="D", markeredgecolor="0.25", linestyle="none")
    height = 1.0 + 0.32 * max(len(study.part("table2", alpha)) for alpha in alphas)
    figure, grid = axes_for(f"{study.title}: best test accuracy (%)", 1, len(alphas), list(marks), height)
    for axes, alpha in zip(grid[0], alphas, strict=True):
        rows = list(reversed(study.part("table2", alpha)))
        reported = study.reported(alpha) if len(marks) > 1 else {}
        for y, row in enumerate(rows):
            _dots(axes, y, row, reported.get(row.line.name))
        axes.set_yticks(range(len(rows)), [row.line.label for row in rows])
        axes.set_title(f"alpha {alpha:g}", fontsize=10.5, loc="left")
        house.tidy(axes)
    legend(figure, {}, marks)
    return figure


def _dots(axes: Axes, y: int, row: Row, theirs: published.Reported | None) -> None:
    color = RED if row.line.name == "feddpc" else BLUE
    if (about := row.about("best")) is not None:
        axes.plot([100 * v for v in row.of("best").values()], [y] * about.count, "|", color=color, alpha=0.6)
        spread = 100 * (about.spread or 0.0)
        axes.errorbar(100 * about.mean, y, xerr=spread, fmt="o", color=color, capsize=3, zorder=4)
    if theirs is not None:
        axes.plot(theirs.accuracy, y, "D", color="white", markeredgecolor="0.25", zorder=3)


def ablation(study: Study, alpha: float) -> Figure:
    """Draw figure 4: FedDPC, without scaling, without both, and the control."""
    return _one_line(f"{study.title}: ablation, alpha {alpha:g}", _there(study, "figure4", alpha))


def lambdas(study: Study, alpha: float) -> Figure:
    """Draw figure 5: test accuracy and loss over rounds for every lambda; lambda = 1 comes first and is red."""
    rows = [row for row in _there(study, "figure5", alpha) if row.line.name.startswith("lambda")]
    rows.sort(key=lambda row: row.line.name != "lambda 1")
    return _one_line(f"{study.title}: FedDPC with other lambdas, alpha {alpha:g}", rows)


def _one_line(title: str, rows: Sequence[Row]) -> Figure:
    groups = [row.group for row in rows]
    style = style_of(groups)
    figure, grid = axes_for(title, 1, len(CURVES), list(style))
    curves_on(grid[0], CURVES, groups, style, "")
    legend(figure, style)
    return figure


def geometry(study: Study) -> Figure:
    """Draw FedDPC's mean factor and cosine over rounds, a curve for each alpha; dashed: 1 + lambda, a right angle."""
    groups = [Group(f"FedDPC, alpha {row.line.alpha:g}", row.group.runs) for row in _turned(study)]
    style = style_of(groups)
    figure, grid = axes_for(f"{study.title}: what FedDPC does to updates", 1, len(GEOMETRY), list(style))
    curves_on(grid[0], GEOMETRY, groups, style, "")
    for axes, level in zip(grid[0], (1 + published.LAMBDA, 0.0), strict=True):
        axes.axhline(level, color="0.4", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    legend(figure, style)
    return figure


def lambda_or_step(study: Study, alpha: float) -> Figure:
    """Draw the control of figure 5: accuracy against lambda, and against FedAvg's server step 1 + lambda."""
    rows = {row.line.name: row for row in _there(study, "figure5", alpha)}
    lams = {1 + lam: rows[name] for lam in published.LAMBDAS if (name := f"lambda {lam:g}") in rows}
    steps = {1 + lam: rows[name] for lam in published.LAMBDAS if (name := f"step {1 + lam:g}") in rows}
    marks = {
        "FedDPC with lambda": mark(color=RED, marker="o", linestyle="solid"),
        "FedAvg, step times 1 + lambda": mark(color=BLUE, marker="s", linestyle="dashed"),
    }
    title = f"{study.title}: lambda, or just the server's step? alpha {alpha:g}"
    figure, grid = axes_for(title, 1, 2, list(marks))
    for axes, measure, words in zip(grid[0], ("best", "last10"), ("best", "last 10 rounds"), strict=True):
        _against(axes, lams, measure, RED, "o-")
        _against(axes, steps, measure, BLUE, "s--")
        axes.set_title(f"test accuracy (%), {words}", fontsize=10.5, loc="left")
        axes.set_xlabel("1 + lambda, or the server's step over the clients'")
        house.tidy(axes)
    legend(figure, {}, marks)
    return figure


def _against(axes: Axes, rows: dict[float, Row], measure: str, color: str, look: str) -> None:
    """Draw mean and deviation of a measure over ``rows`` by their place on the axis."""
    known = sorted((x, e.mean, e.spread or 0.0) for x, row in rows.items() if (e := row.about(measure)))
    x, mean, spread = ([100 * point[i] if i else point[i] for point in known] for i in range(3))
    axes.errorbar(x, mean, yerr=spread, fmt=look, color=color, capsize=3, markersize=5)


def _there(study: Study, part: str, alpha: float) -> list[Row]:
    return [row for row in study.part(part, alpha) if row.scores]


def _turned(study: Study) -> list[Row]:
    """Return FedDPC's rows of Table 2 that recorded what it did to updates."""
    rows = [study.find("table2", alpha, "feddpc") for alpha in study.alphas("table2")]
    return [row for row in rows if row is not None and row.of("cosine")]


def axes_for(title: str, lines: int, columns: int, names: Sequence[str], height: float = 2.9) -> tuple[Figure, Any]:
    """Return a figure with ``lines`` times ``columns`` axes, and room for a legend of ``names``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = _SIDE * columns
    words = textwrap.wrap(title, int(13 * width))
    below = 0.22 * math.ceil(len(names) / house.legend_columns(names, width))
    figure = Figure(figsize=(width, height * lines + 0.3 + 0.2 * len(words) + below), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(words), fontsize=11, x=0.01, ha="left")
    return figure, figure.subplots(lines, columns, squeeze=False)


def style_of(groups: Sequence[Group]) -> Style:
    """Return the color and dashes of each label; the first FedDPC is red."""
    one_each = list({group.label: group for group in groups}.values())
    return dict(zip([g.label for g in one_each], house.styles(one_each), strict=True))


def curves_on(
    line: Sequence[Axes], panels: Sequence[Panel], groups: Sequence[Group], style: Style, before: str
) -> None:
    """Draw the panels side by side, their titles after ``before``."""
    for axes, panel in zip(line, panels, strict=True):
        titled = Panel(panel.key, before + panel.title, panel.factor, panel.log)
        house.draw_panel(axes, titled, groups, style)


def legend(figure: Figure, style: Style, more: dict[str, Line2D] | None = None) -> None:
    """Put one legend below all axes: the curves of ``style``, and ``more``."""
    handles = {name: mark(color=color, linestyle=dashes, linewidth=2) for name, (color, dashes) in style.items()}
    handles |= more or {}
    house.add_legend(
        figure, list(handles.values()), list(handles), house.legend_columns(list(handles), figure.get_figwidth())
    )


def mark(**look: Any) -> Line2D:
    """Return what stands for something in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)
