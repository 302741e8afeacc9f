"""The page in a browser: offline and without complaint, readable everywhere, and quick with many runs."""

import csv
import io
import json
import math
import re

import pytest

from feddpc.report.figures import WIDE
from feddpc.report.page import write_page
from feddpc.report.page.embed import numbers
from pages import HELD, HOSTILE

COSTS = {"down": 1.0, "up": 1.0, "down_once": 0.0, "up_once": 0.0}
ACCURACY = "document.querySelector('[data-key=test_accuracy]')"
#: Longer than this is not fluid. A run on an idle machine takes a quarter of it, but test machines are seldom idle.
PATIENCE = 2.0


@pytest.fixture
def compared(make_run):
    """Two methods with two seeds, and one that diverged."""
    notes = {"mean_scale": [2.0, 2.5, 3.0], "mean_cosine": [0.0, 0.5, -0.5], "guarded": [0.0, 1.0, 0.0]}
    shared = {"costs": COSTS, "holdings": HELD, "environment": {"torch": "2.13.0"}}
    return [
        make_run("feddpc", [0.1, 0.2, 0.6], seed=0, notes=notes, **shared),
        make_run("feddpc", [0.3, 0.4, 0.8], seed=1, notes=notes, **shared),
        make_run("fedavg", [0.2, 0.3, 0.4], seed=0, loss=[900, 3, 1], **shared),
        make_run("fedavg", [0.4, 0.5, 0.2], seed=1, loss=[900, 3, 1], **shared),
        make_run("fedcm", [0.05, None], seed=0, rounds=3, status="diverged", who=lambda t: {"rejected": [3]}),
    ]


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that writes the page of some runs and opens it; at the end nothing may have gone wrong."""
    pages = []

    def opened(runs, title=None, **look):
        path = write_page(tmp_path / f"page{len(pages)}.html", runs, title=title)
        pages.append(browser.open(path, **look))
        assert pages[-1].requests() == [path.resolve().as_uri()]
        return pages[-1]

    yield opened
    for page in pages:
        assert page.complaints() == []
        page.close()


def drawn(page, key="test_accuracy"):
    """The lines of a chart, by name: x and y."""
    chart = f"document.querySelector('[data-key={key}]')"
    lines = page.run(f"{chart}.data.filter((t) => t.hoverinfo !== 'skip').map((t) => [t.name, t.x, t.y])")
    return {name: (x, y) for name, x, y in lines}


def rows(page):
    """The first column of the results, from top to bottom."""
    return page.run("[...document.querySelectorAll('.results tbody th')].map((cell) => cell.textContent)")


def downloads(page):
    """What the two buttons save: the rounds as CSV, and everything as JSON."""
    page.run(
        """(() => {
            window.saved = [];
            const make = URL.createObjectURL;
            URL.createObjectURL = (blob) => { window.saved.push(blob.text()); return make.call(URL, blob); };
            HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };
            document.getElementById("download-csv").click();
            document.getElementById("download-json").click();
        })()"""
    )
    table, name, everything, other = page.run("Promise.all(window.saved)")
    assert (name, other) == ("rounds.csv", "report.json")
    return list(csv.DictReader(io.StringIO(table))), json.loads(everything)


def test_every_chart_is_drawn_with_the_means_over_seeds(show, compared):
    page = show(compared)
    lines = drawn(page)
    assert lines["feddpc"] == ([1, 2, 3], pytest.approx([20, 30, 70]))
    assert lines["fedavg"] == ([1, 2, 3], pytest.approx([30, 40, 30]))
    assert lines["fedcm"] == ([1], [5])
    bands = page.run(f"{ACCURACY}.data.filter((t) => t.fill === 'toself').map((t) => t.y)")
    assert bands[0] == pytest.approx([30, 40, 80, 60, 20, 10])  # the highest seed, and back along the lowest
    assert page.run(f"{ACCURACY}.data.filter((t) => t.mode === 'markers').map((t) => [t.x, t.y])") == [[[1], [5]]]
    assert drawn(page, "mean_scale") == {"feddpc": ([1, 2, 3], [2, 2.5, 3])}
    assert drawn(page, "angle") == {"feddpc": ([1, 2, 3], [90, 60, 120])}
    assert page.run("[...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('.scatterlayer path.js-line').length)") == [  # noqa: E501
        5, 5, 5, 2, 2]  # fmt: skip
    scales = page.run("[...document.querySelectorAll('.chart')].map((c) => c.layout.yaxis.type)")
    assert scales == ["linear", "log", "log", "linear", "linear"]


@pytest.mark.parametrize(("high", "scale"), [(WIDE, "linear"), (WIDE + 1, "log")])
def test_losses_are_logarithmic_as_in_the_figures(show, make_run, high, scale):
    page = show([make_run(accuracy=[0.1, 0.9], loss=[high, 1])])
    assert page.run("[...document.querySelectorAll('.chart')].map((c) => c.layout.yaxis.type)") == [
        "linear",
        scale,
        scale,
    ]


def test_curves_can_be_drawn_over_what_was_sent_or_over_time_seed_by_seed_and_smoothed(show, compared):
    page = show(compared)
    page.choose("#x", "sent")
    assert drawn(page)["feddpc"] == ([4, 8, 12], pytest.approx([20, 30, 70]))  # two clients, a model down and one up
    assert "fedcm" not in drawn(page)
    assert "Not counted yet, so not drawn over them: fedcm-seed0." in page.run("document.body.textContent")
    page.choose("#x", "elapsed")
    assert drawn(page)["feddpc"] == ([0.5, 1.5, 3], pytest.approx([20, 30, 70]))
    page.choose("#x", "round")
    page.choose("#show", "seeds")
    assert {name: y for name, (_, y) in drawn(page).items() if name and "feddpc" in name} == {
        "feddpc seed 0": pytest.approx([10, 20, 60]),
        "feddpc seed 1": pytest.approx([30, 40, 80]),
    }
    page.choose("#show", "both")
    assert {"feddpc", "feddpc seed 0", "feddpc seed 1"} < drawn(page).keys()
    page.choose("#show", "mean")
    page.choose("#smooth", "10")
    assert drawn(page)["feddpc"] == ([1, 2, 3], pytest.approx([20, 25, 40]))
    page.choose("figure:has([data-key=angle]) select", "guarded")
    assert drawn(page, "guarded") == {"feddpc": ([1, 2, 3], pytest.approx([0, 0.5, 1 / 3]))}


def test_seeds_that_end_early_make_no_jump(show, make_run):
    page = show([make_run(accuracy=[0.1, 0.2, 0.3], seed=0), make_run(accuracy=[0.3], seed=1, rounds=3, status=None)])
    assert {name: [v for v in y if v is not None] for name, (_, y) in drawn(page).items()} == {
        "fedavg": pytest.approx([20]),
        "fedavg (some seeds)": pytest.approx([20, 30]),
    }
    sizes = page.run(f"{ACCURACY}.data.find((t) => t.name === 'fedavg').marker.size")
    assert sizes == [6, 0, 0]  # a point without neighbours is a dot


@pytest.mark.parametrize("accuracy", [[], [0.5], [None, None]], ids=["no round", "one round", "no accuracy"])
def test_a_single_run_that_has_hardly_begun(show, make_run, accuracy):
    page = show([make_run("feddpc", accuracy, loss=[None] * len(accuracy), status=None, rounds=9)])
    points = [(x, y) for x, y in drawn(page).values()]
    assert points == ([([1], [50])] if accuracy == [0.5] else [([], [])])
    assert "feddpc" in page.run("document.querySelector('h1').textContent")


def test_the_legend_switches_configurations_in_all_charts(show, compared):
    page = show(compared)
    page.run("document.querySelectorAll('#legend button')[1].click()")
    assert drawn(page).keys() == {"feddpc", "fedcm", None}
    assert "fedavg" not in drawn(page, "train_loss")
    assert page.run("document.querySelectorAll('#legend [aria-pressed=false]').length") == 1
    assert page.run("document.getElementById('drawn').textContent") == "2 of 3 drawn"
    page.run("document.querySelectorAll('#which button')[1].click()")
    assert drawn(page) == {}
    page.run("document.querySelectorAll('#which button')[0].click()")
    assert drawn(page).keys() == {"feddpc", "fedavg", "fedcm", None}


def test_of_many_configurations_the_ten_best_are_drawn(show, make_run):
    page = show([make_run("fedprox", [0.01 * i, 0.02 * i], hyper={"mu": float(i)}) for i in range(14)])
    assert drawn(page).keys() == {f"fedprox mu={i}" for i in range(4, 14)}


def test_the_table_sorts_by_click_and_by_key(show, compared):
    page = show(compared)
    assert rows(page) == ["feddpc", "fedavg", "fedcm"]
    header = "document.querySelector('.results thead th:nth-child({})')"
    method, best = header.format(1), header.format(3)
    page.run(f"{method}.querySelector('button').click()")
    assert (rows(page), page.run(f"{method}.ariaSort")) == (["fedavg", "fedcm", "feddpc"], "ascending")
    page.run(f"{best}.querySelector('button').focus()")
    page.press("Enter")
    assert (rows(page), page.run(f"{best}.ariaSort")) == (["feddpc", "fedavg", "fedcm"], "descending")
    assert page.run(f"{method}.ariaSort") is None
    page.press(" ")
    assert (rows(page), page.run(f"{best}.ariaSort")) == (["fedcm", "fedavg", "feddpc"], "ascending")


def test_the_page_can_be_used_by_keyboard(show, compared):
    """Tab reaches every control in the order of the page, and the arrow keys read a chart."""
    page = show(compared)
    where = "document.activeElement.id || document.activeElement.dataset.key || document.activeElement.textContent"
    reached = []
    while "download-json" not in reached and len(reached) < 200:
        page.press("Tab")
        reached.append(page.run(where))
    order = ["best %", "x", "show", "smooth", "all", "feddpc", "test_accuracy", "train_loss", "mean_scale"]
    order += ["schedule-choice", "holdings-choice", "The same in all runs", "download-csv", "download-json"]
    places = [reached.index(one) for one in order]
    assert places == sorted(places)
    page.run(f"{ACCURACY}.focus()")
    for key, words in (
        ("ArrowRight", "round 1: feddpc 20, fedavg 30, fedcm 5"),
        ("End", "round 3: feddpc 70, fedavg 30"),
        ("ArrowLeft", "round 2: feddpc 30, fedavg 40"),
    ):
        page.press(key)
        assert page.run("document.getElementById('heard').textContent") == words
    page.wait(f"{ACCURACY}.querySelectorAll('.hoverlayer .hovertext, .hoverlayer .legend').length > 0")


def test_who_took_part_and_who_holds_what(show, compared):
    page = show(compared)
    picture = "document.getElementById('schedule')"
    z = page.run(f"{picture}.data[0].z")
    assert len(z) == 100
    assert z[:3] == [[1, 1, 1], [1, 1, 1], [None, None, None]]
    assert page.run(f"{picture}.data.length") == 1
    words = "document.getElementById('schedule-words').textContent"
    assert page.run(words) == "Each of 100 clients took part in 0 to 3 of 3 rounds."
    page.choose("#schedule-choice", "4")
    assert page.run(words) == "Each of 100 clients took part in 0 of 2 rounds; 2 times a client was rejected."
    assert page.run(f"{picture}.data[0].z[3]") == [1, 1]
    held = page.run("document.getElementById('holdings').data.map((t) => [t.type, t.customdata ?? t.y])")
    assert held == [["heatmap", [[3, 1, 0], [0, 4, 2]]], ["bar", [3, 5, 2]]]
    assert "3 clients hold 2 to 5 samples, of 1.3 of the 2 classes" in page.run("document.body.textContent")


def test_how_each_client_is_served(show, make_run):
    values = {"accuracy": [0.0, 0.5, 1.0, 1.0], "finetuned_accuracy": [1.0] * 4, "loss": [1.0, 2.0, None, 3.0]}
    runs = [make_run("feddpc", [0.1], seed=s, per_client={"round": 1, "metrics": values}) for s in (0, 1)] + [
        make_run("fedavg", [0.1], per_client={"round": 1, "metrics": {"accuracy": [0.5, 0.5]}})
    ]
    page = show(runs)
    picture = "document.getElementById('fairness')"
    found = page.run(f"{picture}.data.map((t) => [t.name, t.x[0], t.x[20], t.y.slice(0, 20)])")
    assert [(name, low, high) for name, low, high, _ in found] == [("feddpc", 0, 1), ("fedavg", 0, 1)]
    assert [(i, y) for i, y in enumerate(found[0][3]) if y] == [(0, 25), (10, 25), (19, 50)]
    assert [(i, y) for i, y in enumerate(found[1][3]) if y] == [(10, 100)]
    page.choose("#fairness-choice", "loss")
    assert page.run(f"{picture}.data.map((t) => t.name)") == ["feddpc"]
    assert page.run("document.getElementById('fairness-words').textContent") == "feddpc: mean 2.00, 6 values"


def test_many_clients_are_drawn_in_blocks(show, make_run):
    run = make_run(accuracy=[0.1] * 100, clients=10_000, who=lambda t: {"participants": [0, 9_999]})
    page = show([run])
    z = page.run("document.getElementById('schedule').data[0].z.map((row) => row[0])")
    assert len(z) == math.ceil(10_000 / 3)  # 100 rounds of 10,000 clients, at most 400,000 cells
    assert [i for i, value in enumerate(z) if value] == [0, 3333]


def test_downloads_hold_the_numbers(show, compared):
    page = show(compared)
    table, everything = downloads(page)
    assert everything == numbers(compared)
    assert len(table) == 14
    assert table[2] == {
        "run": "feddpc-seed0", "configuration": "feddpc", "seed": "0", "round": "3", "test_accuracy": "0.6",
        "test_loss": "1", "train_loss": "1", "seconds": "1.5", "elapsed": "3", "sent": "12",
        "mean_scale": "3", "mean_cosine": "-0.5", "guarded": "0", "angle": "120",
    }  # fmt: skip


def test_hostile_names_stay_names(show, make_run, tmp_path):
    runs = [
        make_run(HOSTILE, [0.5, 0.6], seed=s, hyper={HOSTILE: HOSTILE}, data=HOSTILE, notes={HOSTILE: [0.5, 0.5]},
                 status="diverged", reason=HOSTILE, environment={HOSTILE: HOSTILE},
                 folder=tmp_path / f"{HOSTILE.replace('/', '|')}{s}", holdings={"classes": [HOSTILE], "counts": [[1]]})
        for s in (0, 1)
    ]  # fmt: skip
    runs.append(make_run('=HYPERLINK("http://a.b")', [0.5]))
    page = show(runs, title=HOSTILE)
    assert page.run("document.querySelectorAll('script').length") == 3
    assert page.run("document.querySelectorAll('img, a[href]').length") == 0
    shown = HOSTILE.replace("\u2028", "\N{REPLACEMENT CHARACTER}")
    assert page.run("document.querySelector('h1').textContent") == page.run("document.title") == shown
    page.run(f"{ACCURACY}.focus()")
    page.press("End")
    page.wait(f"{ACCURACY}.querySelectorAll('.hoverlayer *').length > 0")
    assert page.run("document.querySelectorAll('img, a[href]').length") == 0
    assert shown[:20] in page.run(f"{ACCURACY}.querySelector('.hoverlayer').textContent")
    table, everything = downloads(page)
    assert everything["runs"][0]["config"]["method"] == table[0]["run"][:-1].replace("|", "/") == HOSTILE
    assert table[-1]["configuration"].startswith("'=HYPERLINK")  # a name and no formula


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_every_screen_and_is_legible_on_it(show, compared, make_run, width, dark):
    long = make_run("m" * 200, [0.5], hyper={"x" * 80: "y" * 300}, environment={"platform": "z" * 300})
    page = show([*compared, long], width=width, height=740, dark=dark)
    page.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert page.run("document.documentElement.scrollWidth") <= width
    tick = f"getComputedStyle({ACCURACY}.querySelector('.xtick text')).fill"
    colours = page.run(f"[getComputedStyle(document.body).backgroundColor, {tick}]")
    ground, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours)
    assert (ground < 60, ink > 200) == (dark, dark)
    assert abs(ground - ink) > 150
    assert page.run(f"{ACCURACY}.getBoundingClientRect().right") <= width


def test_colours_follow_the_screen(show, compared):
    page = show(compared)
    colour = f"{ACCURACY}.data.find((t) => t.name === 'feddpc').line.color"
    light = page.run(colour)
    page.colours("dark")
    page.wait(f"{colour} !== {json.dumps(light)}")
    page.colours("light")
    page.wait(f"{colour} === {json.dumps(light)}")


def test_it_prints_in_light_colours_with_everything_open(show, compared):
    page = show(compared, dark=True)
    page.run(
        """addEventListener("beforeprint", () => {
            window.printed = [getComputedStyle(document.body).backgroundColor,
                              document.querySelectorAll("details:not([open])").length,
                              document.querySelector(".chart").clientWidth];
        })"""
    )
    paper = page.pdf()
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", paper)) >= 2
    ground, closed, width = page.run("window.printed")
    assert (ground, closed) == ("rgb(255, 255, 255)", 0)
    assert width < 700
    page.wait("document.querySelectorAll('details:not([open])').length === 1")  # as it was


def test_twenty_runs_of_eight_hundred_rounds_stay_fluid(show, make_run):
    runs = [
        make_run("fedprox", [0.5 + 0.3 * math.sin(t / 50 + i) for t in range(800)], hyper={"mu": float(i)}, costs=COSTS,
                 loss=[math.exp(-t / 100) for t in range(800)], who=lambda t: {"participants": [t % 100]})
        for i in range(20)
    ]  # fmt: skip
    page = show(runs)
    assert page.seconds < 10
    page.run("document.querySelectorAll('#which button')[0].click()")
    assert len(drawn(page)) == 20
    assert all(len(x) == 800 for x, _ in drawn(page).values())
    for control, value in (("#x", "sent"), ("#x", "round"), ("#smooth", "10"), ("#schedule-choice", "3")):
        assert page.choose(control, value) < PATIENCE, control
