"""Curves show the mean and the range over seeds, and nothing that no seed did."""

import re
import sys
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from feddpc.errors import BadInputError
from feddpc.report.figures import DARK, DASHES, curves, save, styles, svg
from feddpc.report.groups import groups

RED = "#cc3311"


def lines(axes):
    """Return the curves of a panel, crosses left out: colour, x and y where there is a y."""
    found = []
    for line in (one for one in axes.lines if one.get_marker() != "x"):
        x, y = (np.asarray(v, float) for v in line.get_data())
        there = np.isfinite(y)
        found.append((to_hex(line.get_color()), x[there].tolist(), y[there].tolist()))
    return found


def test_line_is_the_mean_and_band_the_range(make_run):
    runs = [make_run("feddpc", [0.2, 0.4], loss=[2, 1], seed=0), make_run("feddpc", [0.4, 0.8], loss=[4, 2], seed=1)]
    accuracy, loss = curves(runs).axes
    ((colour, x, y),) = lines(accuracy)
    assert (colour, x, y) == (RED, [1, 2], pytest.approx([30, 60]))
    assert lines(loss) == [(RED, [1, 2], [3.0, 1.5])]
    (band,) = accuracy.collections
    box = band.get_paths()[0].get_extents()
    assert (box.xmin, box.xmax, box.ymin, box.ymax) == pytest.approx((1, 2, 20, 80))
    assert curves(runs[:1]).axes[0].collections[:] == []


def test_seeds_that_end_early_or_lack_a_value_make_no_jump(make_run):
    long = make_run(accuracy=[0.1, 0.2, 0.3, 0.4], seed=0)
    short = make_run(accuracy=[0.3, None], seed=1, rounds=4, status=None)
    together, alone = lines(curves([long, short]).axes[0])
    assert together[1:] == ([1], pytest.approx([20]))
    assert alone[1:] == ([2, 3, 4], pytest.approx([20, 30, 40]))


def test_points_without_neighbours_are_dots(make_run):
    (line,) = curves([make_run(accuracy=[0.1, None, 0.3, 0.4, None, 0.6])]).axes[0].lines
    assert (line.get_marker(), line.get_markevery()) == ("o", [0, 5])
    (line,) = curves([make_run(accuracy=[0.7])]).axes[0].lines
    assert (line.get_marker(), line.get_markevery()) == ("o", [0])
    (line,) = curves([make_run(accuracy=[0.1, 0.2])]).axes[0].lines
    assert line.get_marker() == "None"


def test_a_run_that_diverged_ends_in_a_cross(make_run):
    runs = [make_run("fedcm", [0.1, 0.3, None], loss=[1, 5, None], status="diverged"), make_run("fedavg", [0.2] * 3)]
    figure = curves(runs)
    for axes, y in zip(figure.axes, (30, 5), strict=True):
        (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
        assert ([*cross.get_xdata()], [*cross.get_ydata()]) == ([2], pytest.approx([y]))
        assert cross.get_color() == lines(axes)[0][0]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["fedcm", "fedavg", "diverged"]
    assert [t.get_text() for t in curves(runs[1:]).legends[0].get_texts()] == ["fedavg"]


@pytest.mark.parametrize(
    ("loss", "scale"),
    [([5, 1], "linear"), ([20, 1], "linear"), ([21, 1], "log"), ([21, 0], "linear"), ([21, -1], "linear")],
)
def test_loss_is_logarithmic_only_if_positive_and_wide(make_run, loss, scale):
    accuracy, axes = curves([make_run(accuracy=[0.001, 0.9], loss=loss)]).axes
    assert axes.get_yscale() == scale
    assert accuracy.get_yscale() == "linear"


def test_every_configuration_has_its_own_look_and_feddpc_is_red(make_run):
    runs = [make_run("feddpc" if i == 4 else f"m{i}") for i in range(30)]
    look = styles(groups(runs))
    assert look[4] == (RED, "solid")
    assert len(set(look)) == 30
    assert len({colour for colour, _ in look[:9]}) == 9  # nine colours before any comes again with dashes
    assert [c for c, _ in look].count(RED) == 1
    # on a dark screen and in the page's charts they have as many looks
    assert len({(DARK[colour], DASHES[dash]) for colour, dash in look}) == 30


@pytest.mark.parametrize("name", ["$x_1$", "$\\frac$", "_hidden", "<b>&amp;", "x" * 3000, "{\\frac"])
def test_any_name_can_be_drawn(make_run, name):
    figure = curves([make_run(name, [0.1, 0.2], status="diverged"), make_run("fedavg", [0.1, 0.2])])
    tree = ET.fromstring(svg(figure))
    texts = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert (name in texts) if len(name) < 50 else any(t.startswith("xxx") and len(t) < 60 for t in texts)


def test_nothing_to_draw(make_run):
    figure = curves([make_run(accuracy=[])])
    assert svg(figure).count("nothing recorded") == 2
    with pytest.raises(BadInputError, match="no runs"):
        curves([])


def test_svg_is_the_same_each_time_and_loads_nothing(make_run):
    runs = [make_run("feddpc", [0.1, 0.2], seed=s) for s in (0, 1)]
    settings = dict(matplotlib.rcParams)
    one, again = svg(curves(runs)), svg(curves(runs))
    assert dict(matplotlib.rcParams) == settings
    assert one == again
    used = re.findall(r'(?:href="#|url\(#)([^")]*)', one)
    assert used
    assert set(used) <= set(re.findall(r'\sid="([^"]*)"', one))
    assert ">training loss</text>" in one
    assert one.startswith("<svg")
    assert one.endswith("</svg>")
    assert set(re.findall(r'http[^"]*', one)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_save_writes_what_the_name_says(tmp_path, make_run):
    figure = curves([make_run(accuracy=[0.1, 0.5])])
    for name in ("c.png", "c.svg", "c.pdf"):
        save(figure, tmp_path / name)
    with Image.open(tmp_path / "c.png") as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("L")).std() > 5
    ET.parse(tmp_path / "c.svg")
    assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pdf", "c.png", "c.svg"]
    with pytest.raises(BadInputError, match=r"'c\.bmp': must end in \.png"):
        save(figure, tmp_path / "c.bmp")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
