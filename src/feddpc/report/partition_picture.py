"""A picture of a partition: which client holds how much of which class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from feddpc.errors import BadInputError

_MOST_CLIENTS = 1000  # columns narrower than a pixel show nothing
_MOST_NAMES = 60  # rows lower than a line of print
_BAR = "#3b6ea5"


def draw(
    counts: npt.ArrayLike,
    path: str | Path,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """Write a PNG: a row for each class, a column for each client, darker for more samples; above, the clients' sizes.

    White is none at all. The colour scale is a square root, so that a client's few samples of a class still show.
    The dashed line is the average client. Of more than 1000 clients, 1000 evenly spaced ones are drawn.

    Args:
        counts: samples by client and class, ``[clients, classes]``, as from `Partition.counts`.
        path: the file to write.
        class_names: names for the rows; numbers if None.
        title: a heading; none if None.
    """
    table = np.asarray(counts)
    if table.ndim != 2 or 0 in table.shape:
        raise BadInputError(f"counts of shape {table.shape}: must be [clients, classes] with at least one of each")
    clients, classes = table.shape
    if class_names is not None and len(class_names) != classes:
        raise BadInputError(f"class_names has {len(class_names)} names for {classes} classes: give one for each")
    shown = np.linspace(0, clients - 1, min(clients, _MOST_CLIENTS)).round().astype(np.int64)

    width = float(np.clip(3.5 + 0.07 * len(shown), 6.5, 13))
    rows = float(np.clip(0.24 * classes, 2.2, 8.5))
    figure = Figure(figsize=(width, rows + 2.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.2, rows), width_ratios=(width - 0.7, 0.15))
    main = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=main)
    if title:
        figure.suptitle(title, fontsize=12)

    above.bar(np.arange(len(shown)), table[shown].sum(1), width=1.0 if len(shown) > 60 else 0.85, color=_BAR)
    above.axhline(float(table.sum() / clients), color="0.25", linewidth=0.8, linestyle=(0, (4, 3)))
    above.set_ylabel("samples")
    above.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    above.spines[["top", "right"]].set_visible(False)
    above.tick_params(axis="x", which="both", bottom=False, labelbottom=False)

    colours = colormaps["YlGnBu"].with_extremes(bad="white")
    nonzero = np.ma.masked_equal(table[shown].T, 0)
    most = max(1, int(table[shown].max()))
    norm = PowerNorm(0.5, vmin=0, vmax=most)
    image = main.imshow(nonzero, aspect="auto", cmap=colours, norm=norm, interpolation="nearest", origin="upper")
    every = np.arange(classes) if classes <= 30 else np.arange(0, classes, _step(classes))
    if class_names is not None and classes <= _MOST_NAMES:
        every = np.arange(classes)
    main.set_yticks(every, [str(r) if class_names is None else class_names[int(r)] for r in every])
    main.tick_params(axis="y", labelsize=9 if len(every) <= 30 else 6)
    columns = np.arange(0, len(shown), _step(len(shown)))
    main.set_xticks(columns, [str(shown[j]) for j in columns])
    if len(shown) * classes <= 2500:
        main.set_xticks(np.arange(len(shown) + 1) - 0.5, minor=True)
        main.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        main.grid(which="minor", color="0.92", linewidth=0.5)
    main.tick_params(which="minor", length=0)
    main.set_xlabel("client" if len(shown) == clients else f"client ({len(shown)} of {clients})")
    if class_names is None:
        main.set_ylabel("class")
    scale = figure.add_subplot(grid[1, 1])
    figure.colorbar(image, cax=scale, label="samples of the class", ticks=_root_ticks(most))
    figure.savefig(path, format="png")


def _step(n: int) -> int:
    """Return the round number that puts at most about twenty ticks on ``n`` places."""
    return next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if n / s <= 21 or s == 200)


def _root_ticks(most: int) -> list[int]:
    """Return round numbers up to ``most`` that do not crowd each other on a square-root scale."""
    ticks = [0]
    for number in (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)):
        if number <= most and number**0.5 - ticks[-1] ** 0.5 >= 0.12 * most**0.5:
            ticks.append(number)
    return ticks
