"""What the figures show, read from the drawn axes."""

import dataclasses

import numpy as np
import pytest

from feddpc.paper import figures, published
from feddpc.paper.study import PaperStudy
from feddpc.paper.study_spec import ROWS, label
from made_up import row


def diamonds(axes):
    return {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"}


def names(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_have_the_papers_best_beside_them_at_the_papers_scale(study, whole):
    drawn = figures.curves(whole)
    accuracy = drawn.axes[0]
    assert diamonds(accuracy) == {(cell.round, cell.accuracy) for cell in published.TABLE2["cifar10", 0.2].values()}
    assert diamonds(drawn.axes[1]) == set()  # the paper gives no numbers for its losses
    assert "the paper's best" in names(drawn)
    short = figures.curves(study)
    assert not any(diamonds(axes) for axes in short.axes)
    assert names(short) == [label(name) for name in ROWS]


def test_every_alpha_has_its_axes(study):
    titles = [axes.get_title(loc="left") for axes in figures.curves(study).axes]
    assert titles == [f"alpha {a}: {t}" for a in ("0.2", "0.6") for t in ("test accuracy (%)", "training loss")]


@pytest.mark.parametrize(
    "draw",
    [
        figures.curves,
        figures.accuracies,
        figures.geometry,
        lambda s: figures.ablation(s, 0.2),
        lambda s: figures.lambdas(s, 0.2),
        lambda s: figures.lambda_or_step(s, 0.2),
    ],
)
def test_every_figure_says_that_it_is_shortened(study, whole, draw):
    def title(figure):
        return figure.get_suptitle().replace("\n", " ")

    assert "digits, shortened: 4 of the paper's 400 rounds" in title(draw(study))
    assert "CIFAR-10, the paper's scale" in title(draw(whole))


def test_accuracies_show_mean_deviation_and_seeds(whole):
    (axes, _) = figures.accuracies(whole).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [label(name) for name in reversed(ROWS)]
    y = list(reversed(ROWS)).index("feddpc")
    best = whole.scored("table2", 0.2)["feddpc"].values("best")
    seeds = next(
        li for li in axes.lines if li.get_marker() == "|" and li.get_ydata()[0] == y and len(li.get_xdata()) == 5
    )
    np.testing.assert_allclose(sorted(seeds.get_xdata()), sorted(100 * v for v in best.values()))
    dot = next(li for li in axes.lines if li.get_marker() == "o" and li.get_ydata()[0] == y)
    assert dot.get_xdata()[0] == pytest.approx(100 * np.mean(list(best.values())))
    assert (55.44, y) in diamonds(axes)


def test_accuracies_on_other_data_are_not_put_on_one_axis(study):
    assert not any(diamonds(axes) for axes in figures.accuracies(study).axes)


def test_lambda_and_the_servers_step_are_on_one_axis(study):
    axes, last = figures.lambda_or_step(study, 0.2).axes
    lams, steps = (container.lines[0] for container in axes.containers)
    wanted = sorted(1 + lam for lam in published.LAMBDAS)
    assert list(lams.get_xdata()) == list(steps.get_xdata()) == pytest.approx(wanted)
    for lam, y in zip(sorted(published.LAMBDAS), lams.get_ydata(), strict=True):
        about = study.scored("figure5", 0.2)[f"lambda {lam:g}"].estimate("best")
        assert y == pytest.approx(100 * about.mean)
    assert "last 10" in last.get_title(loc="left")
    alone = dataclasses.replace(study, rows=[r for r in study.part("figure5") if r.name == "lambda 1"])
    assert figures.lambda_or_step(alone, 0.2) is not None


def test_lambda_1_is_red_and_first(study):
    drawn = figures.lambdas(study, 0.2)
    assert names(drawn)[0] == "lambda 1"
    assert drawn.legends[0].get_lines()[0].get_color() == "#cc3311"


def test_geometry_shows_what_no_change_would_be(study):
    scale, cosine = figures.geometry(study).axes
    levels = [line.get_ydata()[0] for axes in (scale, cosine) for line in axes.lines if len(line.get_xdata()) == 2]
    assert levels == [1 + published.LAMBDA, 0.0]


def test_nothing_is_drawn_of_what_was_not_run(study):
    everything = ("grid", "table2", "figure4", "figure5")
    assert figures.available(PaperStudy("digits", "tiny", ""), everything) == {}
    unrun = [row(part, "feddpc", [], seeds=(0,)) for part in everything]
    assert figures.available(PaperStudy("digits", "tiny", "", unrun), everything) == {}
    assert list(figures.available(study, ("figure4",))) == ["ablation-alpha0.2"]


def test_files(study, tmp_path):
    paths = figures.draw_all(study, tmp_path, ("table2", "figure4", "figure5"))
    assert [p.name for p in paths] == [
        "table2.png",
        "curves.png",
        "geometry.png",
        "ablation-alpha0.2.png",
        "lambda-alpha0.2.png",
        "step-alpha0.2.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    without = PaperStudy("digits", "tiny", "", [row("table2", "fedcm", [0.5])])
    assert [p.stem for p in figures.draw_all(without, tmp_path, ("table2",))] == ["table2", "curves"]
