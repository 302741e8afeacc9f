"""Axes in the style of the reports, with a title that says what was shortened and one legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from feddpc.report import figures as house
from feddpc.report.figures import Panel
from feddpc.report.groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

#: Colour and dashes by label.
Style = dict[str, tuple[str, Any]]
RED, BLUE = "#cc3311", "#0077bb"
_SIDE = 5.2  #: inches of one pair of axes


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
