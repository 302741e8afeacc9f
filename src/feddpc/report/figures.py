"""Curves of a comparison: one colour per configuration, the mean over its seeds in a band from lowest to highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddpc.errors import BadInputError
from feddpc.report.groups import SeedGroup, groups, primaries, status
from feddpc.runs.stored import StoredRun
from feddpc.storage import replace_file, replace_text
from feddpc.tasks.metrics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Masked = np.ma.MaskedArray[Any, np.dtype[np.float64]]

_RED = "#cc3311"  # FedDPC, as in the paper's figures
#: Told apart by colour-blind readers, from each other and from the red (after Paul Tol's vibrant and bright schemes);
#: beside each colour, its like on a dark screen.
_PALETTE = {
    "#0077bb": "#4aa8e0",
    "#ee7733": "#ff9a5c",
    "#009988": "#2cc4b2",
    "#aa3377": "#e57bb5",
    "#33bbee": "#8ad9f8",
    "#555555": "#b4b4b4",
    "#bb9900": "#e3c64a",
    "#332288": "#a79bf0",
}
DARK = {_RED: "#ff6f52"} | _PALETTE
#: Dashes as matplotlib writes them, and what Plotly calls them.
DASHES: dict[Any, str] = {
    "solid": "solid",
    (0, (5, 2)): "dash",
    (0, (1, 1.5)): "dot",
    (0, (6, 2, 1, 2)): "dashdot",
}
_FORMATS = ("png", "svg", "pdf")
#: The ratio of largest to smallest value above which a panel that may be logarithmic is; curves.js has it too.
WIDE = 20


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a key of the records over the rounds."""

    key: str
    title: str
    factor: float = 1.0
    log: bool = False  #: a logarithmic scale, if all values are positive and far apart


TRAIN_LOSS = Panel("train_loss", "training loss", log=True)
GEOMETRY = (
    Panel("mean_scale", "mean scale of the updates", log=True),
    Panel("mean_cosine", "mean cosine to the last step"),
)


def metric_panel(metric: Metric, part: str = "test") -> Panel:
    """Return the axes of a metric: in percent where it is a share, perhaps logarithmic where less is better.

    >>> metric_panel(Metric("mse", "min"))
    Panel(key='test_mse', title='test mse', factor=1.0, log=True)
    """
    return Panel(metric.key(part), f"{part} {metric.title}", metric.factor, metric.direction == "min")


def curves(runs: Sequence[StoredRun]) -> Figure:
    """Draw primary metric and training loss over the rounds; the last round of a run that diverged bears a cross.

    Where some seeds have ended or lack a value, the mean of the others goes on as a thin dashed line. Where rounds were
    not evaluated, dots mark those that were.
    """
    if not runs:
        raise BadInputError("no runs to draw: give at least one")
    return _draw(groups(runs))


def styles(every: Sequence[SeedGroup]) -> list[tuple[str, Any]]:
    """Return colour and dashes of each group: the first FedDPC is red, the others go through the palette."""
    red = next((i for i, group in enumerate(every) if group.method == "feddpc"), None)
    palette, dashes = list(_PALETTE), list(DASHES)
    looks: list[tuple[str, Any]] = []
    for i in range(len(every)):
        turn, place = divmod(i - (red is not None and i > red), len(palette))
        looks.append((_RED, "solid") if i == red else (palette[place], dashes[turn % len(dashes)]))
    return looks


def _draw(every: Sequence[SeedGroup]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    style = {group.label: s for group, s in zip(every, styles(every), strict=True)}
    panels = [*map(metric_panel, primaries(every)), TRAIN_LOSS]
    crossed = any(_end(run, panel.key) for g in every for run in g.runs for panel in panels)
    names = [_short(g.label) for g in every] + ["diverged"] * crossed
    width = 5.2 * len(panels)
    columns = legend_columns(names, width)
    figure = Figure(figsize=(width, 3.3 + 0.22 * math.ceil(len(names) / columns)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw_panel(axes, panel, every, style)
    handles = [Line2D([], [], color=style[g.label][0], linestyle=style[g.label][1], linewidth=2) for g in every]
    handles += [Line2D([], [], color="0.3", marker="x", linestyle="none")] * crossed
    add_legend(figure, handles, names, columns)
    return figure


def legend_columns(names: Sequence[str], width: float) -> int:
    """Return how many entries of a legend stand side by side in a figure of ``width`` inches."""
    return max(1, min(len(names), int(72 * width / (34 + 5.4 * max(map(len, names))))))


def add_legend(figure: Figure, handles: Sequence[Line2D], names: Sequence[str], columns: int) -> None:
    """Put one legend below all axes."""
    legend = figure.legend(
        list(handles), ["label"] * len(names), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)  # a name may hold dollar signs, and begin with an underscore
        text.set_text(name)


def draw_panel(axes: Axes, panel: Panel, some: Sequence[SeedGroup], style: dict[str, tuple[str, Any]]) -> None:
    """Draw the curves of ``some`` groups on ``axes``; ``style`` has colour and dashes of each label."""
    from matplotlib.ticker import MaxNLocator

    drawn = []
    for group in some:
        rounds, table = _matrix(group.runs, panel.key)
        values = np.ma.masked_invalid(panel.factor * table)
        if values.count():
            drawn.append(values.compressed())
            colour, dashes = style[group.label]
            _curve(axes, rounds, values, colour, dashes, on_top=colour == _RED)
            for x, y in filter(None, (_end(run, panel.key) for run in group.runs)):
                axes.plot(x, panel.factor * y, "x", color=colour, markersize=7, markeredgewidth=1.8, zorder=5)
    seen = np.concatenate(drawn) if drawn else np.empty(0)
    if panel.log and len(seen) and seen.min() > 0 and seen.max() > WIDE * seen.min():
        axes.set_yscale("log")
    if not drawn:
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_yticks([])
    axes.set_title(panel.title, fontsize=10.5, loc="left", parse_math=False)  # own metrics may have any name
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Give axes the house style: a pale grid behind, no frame above and to the right."""
    axes.grid(color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _curve(axes: Axes, rounds: Ints, values: Masked, colour: str, dashes: Any, on_top: bool) -> None:
    """Draw one configuration, ``values`` by seed and round, over the ``rounds`` that were evaluated."""
    sparse = bool((np.diff(rounds) > 1).any())
    mean, low, high = (found.filled(np.nan) for found in (values.mean(0), values.min(0), values.max(0)))
    count = values.count(0)
    z = 4 if on_top else 3
    full = count == len(values)
    # Separate lines, because a mean over fewer seeds would show a jump that no seed made.
    for shown, dash, width in ((full, dashes, 2.1 if on_top else 1.6), ((count > 0) & ~full, (0, (3, 2)), 0.9)):
        if not shown.any():
            continue
        if len(values) > 1:
            axes.fill_between(
                rounds, low, high, where=shown.tolist(), color=colour, alpha=0.16, linewidth=0, zorder=z - 2
            )
        line = np.where(shown, mean, np.nan)
        axes.plot(rounds, line, color=colour, linestyle=dash, linewidth=width, zorder=z, **_dots(line, sparse))


def _dots(values: Floats, sparse: bool) -> dict[str, Any]:
    """Mark points without neighbours: no line goes through them; and all points where rounds between are left out."""
    if sparse:
        return {"marker": "o", "markersize": 3}
    finite = np.pad(np.isfinite(values), 1)
    alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return {"marker": "o", "markersize": 4, "markevery": np.flatnonzero(alone).tolist()} if alone.any() else {}


def _matrix(runs: Sequence[StoredRun], key: str) -> tuple[Ints, Floats]:
    """Return the rounds of a curve, and its values by seed and round; NaN where there is none.

    If ``key`` is that of a metric, rounds in which no seed was evaluated are left out.
    """
    table = np.full((len(runs), max(len(run.records) for run in runs)), np.nan)
    metrics = {metric.key(key.partition("_")[0]) for run in runs for metric in run.metrics}
    evaluated = np.full(table.shape[1], key not in metrics)
    for values, run in zip(table, runs, strict=True):
        values[: len(run.records)] = [number(record.get(key)) for record in run.records]
        for t, record in enumerate(run.records):
            evaluated[t] |= any(record.get(name) is not None for name in metrics)
    return np.flatnonzero(evaluated) + 1, table[:, evaluated]


def number(value: Any) -> float:
    """Return ``value`` if it is a finite number, else NaN.

    >>> number(2), number(None), number(float("inf"))
    (2.0, nan, nan)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _end(run: StoredRun, key: str) -> tuple[int, float] | None:
    """Return the last round with a value, and the value, of a run that diverged."""
    if status(run) != "diverged":
        return None
    points = [(i, number(record.get(key))) for i, record in enumerate(run.records, start=1)]
    return next((point for point in reversed(points) if math.isfinite(point[1])), None)


def _short(label: str, most: int = 58) -> str:
    """Cut a long label in the middle; differences tend to stand at the ends."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-most // 2 + 1 :]}"


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, as the name says, all at once."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _FORMATS:
        raise BadInputError(f"figure file {path.name!r}: must end in {', '.join('.' + f for f in _FORMATS)}")
    if kind == "svg":
        return replace_text(path, svg(figure) + "\n")
    undated = {"CreationDate": None} if kind == "pdf" else None
    return replace_file(path, lambda temporary: figure.savefig(temporary, format=kind, metadata=undated))


def svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element: the same bytes each time, text as text."""
    import io

    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "feddpc"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :].rstrip()
