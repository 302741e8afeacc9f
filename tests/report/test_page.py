"""The page is one sound, harmless file with everything in it."""

import base64
import hashlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from feddpc.errors import BadInputError, RunFolderError
from feddpc.report.page import embed, render, write_all, write_page
from feddpc.report.page.embed import numbers
from feddpc.report.partition_picture import draw
from pages import HELD, HOSTILE, Page


@pytest.fixture
def runs(make_run):
    notes = {"mean_scale": [2.0, 3.0], "mean_cosine": [0.5, 0.0]}
    machine = {"python": "3.12.1", "command": ["/home/someone/bin/feddpc", "compare", "a b"], "engine": "loop"}
    return [
        make_run("feddpc", [0.25, 0.5], hyper={"lam": 1.0}, notes=notes, environment=machine, holdings=HELD),
        make_run("fedavg", [0.25, None], seed=0, environment=machine | {"engine": "stacked"}, holdings=HELD),
        make_run(
            "fedavg", [0.5], seed=1, rounds=2, status="diverged", reason="round 1: too <hot>", environment=machine
        ),
    ]


def test_page_is_sound_and_says_what_there_is(runs):
    page = Page(render(runs))
    assert page.texts["title"] == page.texts["h1"] == ["2 configurations on digits"]
    for words in ("50.00", "37.50 ± 17.68", "diverged in 1 of 2 seeds", "lam = 1", "round 1: too <hot>", "3.12.1"):
        assert words in page.text, words
    assert "feddpc compare 'a b'" in page.text
    assert "/home/someone" not in render(runs)
    # sections are named by their headings, ids are unique, every table stands in a box that scrolls
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-labelledby"] for attrs in page.all("section")} <= set(ids)
    assert len(page.all("table")) == len([a for a in page.all("div") if a.get("class") == "scroll"]) == 3
    assert Page(render(runs, title="My <title>")).texts["h1"] == ["My <title>"]


def test_notes_stand_above_the_results(runs):
    text = render(runs, notes=["fedcm-seed0 has not begun", "<b>"])
    assert text.index("fedcm-seed0 has not begun") < text.index('id="results"')
    assert Page(text).texts["li"][:2] == ["fedcm-seed0 has not begun", "<b>"]
    assert 'class="remarks"' not in render(runs).replace('<p class="remarks">', "")


def test_charts_are_there_if_there_is_something_to_draw(runs, make_run):
    def charts(some):
        page = Page(render(some))
        return [a["data-key"] for a in page.all("div") if a.get("class") == "chart"], page

    three = ["test_accuracy", "test_loss", "train_loss"]
    keys, page = charts(runs)
    assert keys == [*three, "mean_scale", "angle"]
    assert "What the methods noted" in page.text
    options = [a["value"] for a in page.all("option")]
    assert [o for o in options if "mean" in o or o == "angle"] == ["mean", *["mean_scale", "angle", "mean_cosine"] * 2]
    keys, page = charts(runs[2:])
    assert keys == three
    assert "What the methods noted" not in page.text
    assert "These runs do not tell who holds what" in page.text
    one_note = make_run("fedexp", [0.5], notes={"step": [1.5]})
    assert charts([one_note])[0] == [*three, "step"]
    held_out = make_run(notes={"validation_accuracy": [0.4], "validation_loss": [1.0]})
    assert charts([held_out])[0] == [*three, "validation_accuracy"]
    nobody = make_run(who=lambda t: {})
    assert "Who took part" in page.text
    assert "Who took part" not in charts([nobody])[1].text


def test_table_can_be_sorted_by_every_column(runs):
    page = Page(render(runs))
    headings = [t for t in page.texts["button"] if "(" not in t]
    assert headings == ["method", "seeds", "best %", "round", "last 10 %", "final %", "s/round", "rounds", "notes"]
    keys = [attrs["data-value"] for attrs in page.all("td") if "data-value" in attrs]
    assert keys == ["1", "0.5", "2", "0.375", "0.5", "1.0", "2", "2", "0.375", "1", "0.375", "0.375", "0.75", "1"]
    assert [attrs.get("class") for attrs in page.all("tr")[:3]] == [None, "best", None]


def test_nothing_is_loaded_and_only_our_scripts_run(runs):
    page = Page(render(runs))
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "form", "a")]
    for tag, attrs in page.tags:
        assert "src" not in attrs, tag
        assert not [name for name in attrs if name.startswith("on") or name.endswith("href")], tag
    style = "".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    _, library, script = page.texts["script"]
    assert "http" not in script
    assert "http" not in page.text
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in (library, script))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "img-src": "data: blob:",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(f"'sha256-{h}'" for h in hashes),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_text_from_files_stays_text(make_run, tmp_path):
    run = make_run(
        HOSTILE,
        [0.5],
        hyper={HOSTILE: HOSTILE},
        data=HOSTILE,
        partition_options={HOSTILE: HOSTILE},
        notes={HOSTILE: [0.5]},
        status="diverged",
        reason=HOSTILE,
        environment={HOSTILE: HOSTILE, "command": [HOSTILE, HOSTILE]},
        folder=tmp_path / HOSTILE.replace("/", "|"),
        holdings={"classes": [HOSTILE], "counts": [[1]]},
    )
    other = make_run(HOSTILE, [0.5], hyper={HOSTILE: "a"}, data="b", environment={HOSTILE: "c"}, folder=tmp_path / "d")
    shown = HOSTILE.replace("\u2028", "\N{REPLACEMENT CHARACTER}")
    for some in ([run], [run, other], [run, run]):
        page = Page(render(some, title=HOSTILE, notes=[HOSTILE]))
        assert len(page.all("script")) == 3
        assert not page.all("img")
        assert page.texts["h1"] == [shown]
        assert page.text.count(shown) > 5
        assert page.data == numbers(some)
        assert "\u2028" not in page.texts["script"][0]


def test_the_library_cannot_end_its_element(runs, monkeypatch):
    from plotly import offline

    monkeypatch.setattr(offline, "get_plotlyjs", lambda: 'const end = "</script><b>";')
    page = Page(render(runs))
    assert page.texts["script"][1] == 'const end = "<\\/script><b>";'


def test_without_the_library_the_remedy_is_said(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(BadInputError, match="pip install plotly"):
        render(runs)


def test_numbers_are_those_of_the_records_with_six_digits(make_run):
    third = make_run("feddpc", [1 / 3, None], loss=[2e-9, 12345678.9], notes={"mean_cosine": [0.5, -1.0]})
    (run,) = numbers([third])["runs"]
    assert run["rounds"] == {
        "round": [1, 2],
        "test_accuracy": [0.333333, None],
        "test_loss": [2e-9, 12345700],
        "train_loss": [2e-9, 12345700],
        "seconds": [0.5, 1],
        "elapsed": [0.5, 1.5],
    }
    assert run["notes"] == {"mean_cosine": [0.5, -1], "angle": [60, 180]}
    assert (run["name"], run["group"], run["seed"], run["status"]) == ("feddpc-seed0", 0, 0, "finished")
    assert run["config"] == third.config.asdict()


def test_numbers_sent_are_what_the_costs_say(make_run):
    """100 clients exchange 3 models before round 1; then each of those that answered 2.5, dropped ones nothing."""
    costs = {"down": 1.5, "up": 1.0, "down_once": 2.0, "up_once": 1.0}

    def who(t):
        return {"participants": [1, 2], "rejected": [7][: t - 1], "dropped": [5]}

    (run,) = numbers([make_run(accuracy=[0.1, 0.2], costs=costs, who=who)])["runs"]
    assert run["rounds"]["sent"] == [300 + 2.5 * 2, 300 + 2.5 * 5]
    for broken in ({"down": 1.0}, {**costs, "up": "x"}, [1]):
        assert "sent" not in numbers([make_run(costs=broken)])["runs"][0]["rounds"]


def test_what_runs_share_is_kept_once(make_run):
    def other(t):
        return {"participants": [2, 3], "dropped": [1]}

    runs = [make_run(m, [0.1, 0.2], seed=s, holdings=HELD, who=other if s else lambda t: {"participants": [t]})
            for m in ("fedavg", "fedcm") for s in (0, 1)]  # fmt: skip
    known = numbers(runs)
    assert known["holdings"] == [HELD]
    assert [run["holdings"] for run in known["runs"]] == [0, 0, 0, 0]
    assert known["schedules"] == [
        {"clients": 100, "participants": [[1], [2]]},
        {"clients": 100, "participants": [[2, 3], [2, 3]], "dropped": [[1], [1]]},
    ]
    assert [run["schedule"] for run in known["runs"]] == [0, 1, 0, 1]
    assert known["left_out"] == []


@pytest.mark.parametrize(
    "broken",
    [{"classes": ["a"]}, {"classes": ["a"], "counts": [[1, 2]]}, {"classes": 3, "counts": [[1]]},
     {"classes": ["a"], "counts": [["x"]]}, {"classes": ["a"], "counts": [3]}, {"classes": [], "counts": []}],
)  # fmt: skip
def test_a_garbled_table_of_holdings_is_none(make_run, broken):
    assert numbers([make_run(holdings=broken)])["runs"][0]["holdings"] is None


def test_long_runs_are_thinned_and_the_page_says_so(make_run, monkeypatch):
    runs = [make_run(accuracy=[t / 100 for t in range(50)], costs={"down": 1, "up": 1, "down_once": 0, "up_once": 0})]
    monkeypatch.setattr(embed, "MOST_VALUES", 100)
    known = numbers(runs)
    (run,) = known["runs"]
    assert run["rounds"]["round"] == [1, *range(3, 50, 3), 50]
    assert run["rounds"]["test_accuracy"][-1] == 0.49
    assert run["rounds"]["elapsed"][-1] == sum(0.5 * t for t in range(1, 51))
    assert run["rounds"]["sent"][-1] == 200
    page = Page(render(runs))
    assert "every 3th between them" in page.text
    assert "The run folders hold all of it." in page.text
    assert len(page.data["runs"][0]["rounds"]["round"]) == 18


def test_tables_that_do_not_fit_are_left_out_and_the_page_says_so(make_run, monkeypatch):
    runs = [
        make_run(accuracy=[0.1] * 4, seed=s, holdings=HELD, who=lambda t, s=s: {"participants": [s]}) for s in (0, 1)
    ]
    monkeypatch.setattr(embed, "MOST_PARTICIPANTS", 4)
    monkeypatch.setattr(embed, "MOST_CELLS", 5)
    known = numbers(runs)
    assert [run["schedule"] for run in known["runs"]] == [0, None]
    assert known["left_out"] == [
        "For 1 run the page does not hold who took part.",
        "For 2 runs the page does not hold who holds what.",
    ]
    assert "For 2 runs the page does not hold who holds what." in Page(render(runs)).text


def test_a_large_sweep_fits_into_fifteen_megabytes(make_run, tmp_path):
    """190 runs of 400 rounds, each with participants of its own, and every number of full length."""
    costs = {"down": 1.0, "up": 1.0, "down_once": 0, "up_once": 0}
    curve = [0.5 + 0.1234567 * math.sin(t) for t in range(400)]
    notes = dict.fromkeys(("mean_scale", "mean_cosine", "guarded"), curve)
    runs = [
        make_run(
            "feddpc", curve, seed=seed, loss=curve, notes=notes, lr=lr, costs=costs, holdings=HELD,
            environment={"torch": "2.13.0", "platform": "x" * 200},
            who=lambda t, seed=seed: {"participants": [(seed * 7 + t * k) % 100 for k in range(1, 11)]},
        )
        for lr, seeds in ((0.1, range(95)), (0.2, range(95, 190))) for seed in seeds
    ]  # fmt: skip
    write_page(tmp_path / "sweep.html", runs)
    assert (tmp_path / "sweep.html").stat().st_size < 15e6
    assert numbers(runs)["left_out"] == []


def test_numbers_that_json_cannot_write(make_run):
    run = make_run(accuracy=[float("nan")], loss=[float("inf")], hyper={"clip": float("inf")})
    (data,) = Page(render([run])).data["runs"]
    assert (data["rounds"]["train_loss"], data["config"]["hyper"]) == ([None], {"clip": "inf"})


def test_what_is_common_stands_once_and_what_differs_comes_first(make_run):
    runs = [
        make_run("fedavg", seed=0, alpha=a, environment={"torch": "2.9", "cores": c}) for a, c in ((0.3, 2), (0.7, 64))
    ]
    text = render(runs)
    page = Page(text)
    common = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert common["clients"] == "100"
    assert common["torch"] == "2.9"
    assert not {"alpha", "cores", "seed"} & set(common)
    assert {"alpha", "cores", "seed"} <= set(page.texts["th"])
    assert {"0.3", "0.7", "2", "64"} <= set(page.texts["td"])
    assert text.index(">alpha</th>") < text.index("<details><summary>The same in all runs")
    assert len(page.all("details")) == 2


@pytest.mark.parametrize("place", ["run", "parent"])
def test_without_numbers_the_picture_of_the_partition_is_embedded(make_run, tmp_path, place):
    run = make_run(folder=tmp_path / "all" / "one")
    run.folder.mkdir(parents=True)
    assert Page(render([run])).all("img") == []
    path = (run.folder if place == "run" else run.folder.parent) / "partition.png"
    path.write_bytes(b"<svg>no picture</svg>")
    assert Page(render([run])).all("img") == []
    draw([[1, 2], [3, 4]], path)
    (image,) = Page(render([run])).all("img")
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == path.read_bytes()
    assert image["alt"]
    assert Page(render([replace(run, holdings=HELD)])).all("img") == []


def test_a_run_that_just_began(make_run):
    page = Page(render([make_run("feddpc", [], status=None, rounds=9)]))
    assert "unfinished: 0 of 9 rounds" in page.text
    assert page.texts["h1"] == ["feddpc on digits"]


def test_write_all_writes_three_files_the_same_each_time(runs, tmp_path):
    paths = write_all(runs, tmp_path / "new" / "report")
    assert [p.name for p in paths] == ["curves.png", "table.csv", "report.html"]
    assert sorted(p.name for p in paths[0].parent.iterdir()) == sorted(p.name for p in paths)
    before = [p.read_bytes() for p in paths]
    assert [p.read_bytes() for p in write_all(runs, tmp_path / "new" / "report")] == before
    assert before[1].startswith(b"label,seeds,")
    assert before[2].decode() == render(runs)


def test_what_cannot_be_written_is_said(runs, tmp_path):
    with pytest.raises(BadInputError, match=r"no runs to report in .*x\.html"):
        write_page(tmp_path / "x.html", [])
    with pytest.raises(RunFolderError, match="cannot be used"):
        write_page(tmp_path / "missing" / "x.html", runs)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        write_all(runs, tmp_path / "file")


def test_costs_and_privacy_are_shown(make_run):
    costs = {"down": 2.0, "up": 1.0, "client_state": 0, "gradients": 1.891089, "passes": None}
    told = {"note": f"Raw samples leave. {HOSTILE}", "disclosed": {"samples_sent": 35}}
    plain = make_run("fedavg", [0.25])
    run = replace(make_run("fedamd", [0.25], costs=costs), privacy=told)
    page = Page(render([plain, run]))
    assert "Costs and privacy" in page.text
    for shown in ("1.89", "Raw samples leave.", "samples sent: 35"):
        assert shown in page.text
    assert len(page.all("script")) == 3  # the hostile note is text
    assert "Costs and privacy" not in Page(render([plain])).text


@pytest.mark.parametrize("broken", [{"costs": {"down": "x"}}, {"costs": []}, {"costs": "x"}, {"costs": None}, {}])
def test_broken_costs_do_not_break_the_page(make_run, broken):
    run = make_run("fedamd", [0.25])
    run = replace(run, summary=run.summary | broken, privacy={"note": 3, "disclosed": [1]})
    assert "what leaves a client" in Page(render([run])).text


def test_our_scripts_write_no_html_and_ask_for_nothing():
    scripts = {path.name: path.read_text(encoding="utf-8") for path in Path(embed.__file__).parent.glob("*.js")}
    assert len(scripts) == 6
    for name, script in scripts.items():
        assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp|import\(", script), name


@pytest.mark.parametrize("broken", [{}, {"metrics": 3}, {"metrics": {"accuracy": "high"}}, {"metrics": {"a": [{}]}}])
def test_garbled_metrics_of_clients_do_no_harm(make_run, broken):
    runs = [make_run(per_client=broken)]
    found = numbers(runs)["runs"][0]["clients"]
    assert all(value is None for values in found.values() for value in values)
    assert render(runs)
