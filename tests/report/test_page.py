"""The page is one sound, harmless file with everything in it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from feddpc.errors import BadInputError, RunFolderError
from feddpc.report.page import numbers, render, write, write_all
from feddpc.report.partition_picture import draw

VOID = {"meta", "img", "br", "link", "input", "hr", "path", "use", "rect"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>$title&amp;"


class Page(HTMLParser):
    """A page taken apart; a tag that is not closed in order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(t for tag, texts in self.texts.items() if tag not in ("script", "style") for t in texts)


@pytest.fixture
def runs(make_run):
    notes = {"mean_scale": [2.0, 3.0], "mean_cosine": [0.5, 0.25]}
    machine = {"python": "3.12.1", "command": ["/home/someone/bin/feddpc", "compare", "a b"], "engine": "loop"}
    return [
        make_run("feddpc", [0.25, 0.5], hyper={"lam": 1.0}, notes=notes, environment=machine),
        make_run("fedavg", [0.25, None], seed=0, environment=machine | {"engine": "stacked"}),
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


def test_charts_are_there_if_there_is_something_to_draw(runs):
    assert len(Page(render(runs)).all("svg")) == 4
    page = Page(render(runs[1:]))
    assert len(page.all("svg")) == 2
    assert "What FedDPC did" not in page.text
    for figure in page.all("figure"):
        assert figure["role"] == "img"
        assert figure["aria-label"]


def test_table_can_be_sorted_by_every_column(runs):
    page = Page(render(runs))
    headings = [t for t in page.texts["button"] if "Download" not in t]
    assert headings == ["method", "seeds", "best %", "round", "last 10 %", "final %", "s/round", "rounds", "notes"]
    keys = [attrs["data-value"] for attrs in page.all("td") if "data-value" in attrs]
    assert keys == ["1", "0.5", "2", "0.375", "0.5", "0.75", "2", "2", "0.375", "1", "0.375", "0.375", "0.625", "1"]
    assert [attrs.get("class") for attrs in page.all("tr")[:3]] == [None, "best", None]


def test_nothing_is_loaded_and_only_our_script_runs(runs, tmp_path):
    page = Page(render(runs))
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "form", "a")]
    for tag, attrs in page.tags:
        assert "src" not in attrs or attrs["src"].startswith("data:image/png;base64,"), tag
        assert all(value.startswith("#") for name, value in attrs.items() if name.endswith("href")), tag
        assert not [name for name in attrs if name.startswith("on")], tag
    style = "".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert {*re.findall(r"https?://[^\"' ]*", render(runs))} == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    _, script = page.texts["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


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
    )
    other = make_run(HOSTILE, [0.5], hyper={HOSTILE: "a"}, data="b", environment={HOSTILE: "c"}, folder=tmp_path / "d")
    for some in ([run], [run, other], [run, run]):
        page = Page(render(some, title=HOSTILE))
        assert len(page.all("script")) == 2
        assert not page.all("img")
        assert page.texts["h1"] == [HOSTILE]
        assert page.text.count(HOSTILE) > 5
        assert json.loads(page.texts["script"][0]) == numbers(some)


def test_numbers_round_trip(runs):
    data = json.loads(Page(render(runs)).texts["script"][0])
    assert data == numbers(runs)
    assert [run["name"] for run in data["runs"]] == ["feddpc-seed0", "fedavg-seed0", "fedavg-seed1"]
    for stored, run in zip(runs, data["runs"], strict=True):
        for key in ("round", "test_accuracy", "train_loss", "seconds"):
            assert run["rounds"][key] == [record[key] for record in stored.records]
        assert run["config"] == stored.config.asdict()
    assert data["runs"][0]["rounds"]["mean_scale"] == [2.0, 3.0]
    assert data["table"][1]["best_accuracy"] == 0.375


def test_numbers_that_json_cannot_write(make_run):
    run = make_run(accuracy=[float("nan")], loss=[float("inf")], hyper={"clip": float("inf")})
    (data,) = json.loads(Page(render([run])).texts["script"][0], parse_constant=pytest.fail)["runs"]
    assert (data["rounds"]["train_loss"], data["config"]["hyper"]) == ([None], {"clip": "inf"})


def test_what_is_common_stands_once_and_what_differs_with_its_run(make_run):
    runs = [
        make_run("fedavg", seed=0, alpha=a, environment={"torch": "2.9", "cores": c}) for a, c in ((0.3, 2), (0.7, 64))
    ]
    page = Page(render(runs))
    common = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert common["clients"] == "100"
    assert common["torch"] == "2.9"
    assert not {"alpha", "cores", "seed"} & set(common)
    assert {"alpha", "cores", "seed"} <= set(page.texts["th"])
    assert {"0.3", "0.7", "2", "64"} <= set(page.texts["td"])


@pytest.mark.parametrize("place", ["run", "parent"])
def test_picture_of_the_partition_is_embedded(make_run, tmp_path, place):
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
        write([], tmp_path / "x.html")
    with pytest.raises(RunFolderError, match="cannot be used"):
        write(runs, tmp_path / "missing" / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        write_all(runs, tmp_path / "file")


def test_costs_and_privacy_are_shown(make_run):
    from dataclasses import replace

    costs = {"down": 2.0, "up": 1.0, "client_state": 0, "gradients": 1.891089, "passes": None}
    told = {"note": f"Raw samples leave. {HOSTILE}", "disclosed": {"samples_sent": 35}}
    plain = make_run("fedavg", [0.25])
    run = make_run("fedamd", [0.25])
    run = replace(run, summary=run.summary | {"costs": costs}, privacy=told)
    page = Page(render([plain, run]))
    assert "Costs and privacy" in page.text
    for shown in ("1.89", "Raw samples leave.", "samples sent: 35"):
        assert shown in page.text
    assert len(page.all("script")) == 2  # the hostile note is text
    assert "Costs and privacy" not in Page(render([plain])).text


@pytest.mark.parametrize("broken", [{"costs": {"down": "x"}}, {"costs": []}, {"costs": None}, {}])
def test_broken_costs_do_not_break_the_page(make_run, broken):
    from dataclasses import replace

    run = make_run("fedamd", [0.25])
    run = replace(run, summary=run.summary | broken, privacy={"note": 3, "disclosed": [1]})
    assert "what leaves a client" in Page(render([run])).text
