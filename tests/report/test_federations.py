"""What a page says about federations: the nodes of the clients, and when the rounds took place."""

import re

import pytest

from feddpc.report.page import federations, render
from pages import Page

#: A node id as Flower makes them, which JavaScript could not hold.
NODE = 2**64 - 3


def federation(t):
    """Round ``t`` of a federation in which client 1 gets a new node in round 3, and client 2 is not asked then."""
    nodes = {"0": NODE, "1": 17 if t < 3 else 18, **({"2": 19} if t < 3 else {})}
    who = {"participants": [0], "dropped": [1], "rejected": [2] if t < 3 else []}
    return who | {"nodes": nodes, "time": f"2026-11-18T23:59:{10 * t}+00:00"} | ({"quarantined": [19]} if t > 2 else {})


def test_the_nodes_of_a_federation_and_its_times_are_shown(make_run):
    text = render([make_run(accuracy=[0.1, 0.2, 0.3], who=federation)])
    page = Page(text)
    assert "Nodes of the clients" in page.text
    rows = [re.findall(r">([^<>]*)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", text)]
    head = ["client", "node", "took part", "dropped out", "rejected", "in quarantine"]
    start = rows.index(head)
    assert rows[start + 1 : start + 4] == [
        ["0", str(NODE), "3", "0", "0", "0"],
        ["1", "17, 18", "0", "3", "0", "0"],
        ["2", "19", "0", "0", "2", "1"],
    ]
    assert text.index("Who took part") < text.index("Nodes of the clients") < text.index("Who holds what")
    (run,) = [row for row in rows if "fedavg-seed0" in row]
    assert run[5:7] == ["2026-11-18 23:59:10 UTC", "2026-11-18 23:59:31 UTC"]  # it began 30 s after, and took 1.5 s
    assert rows[rows.index(run) - 1][5:7] == ["first round began", "last round ended"]


def test_several_federations_have_one_table_of_nodes(make_run):
    runs = [make_run(accuracy=[0.1], seed=seed, who=federation) for seed in (0, 1)]
    text = render([*runs, make_run(accuracy=[0.1], seed=2)])
    cells = [re.findall(r">([^<>]*)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", text)]
    assert [row[:3] for row in cells if str(NODE) in row] == [[f"fedavg-seed{seed}", "0", str(NODE)] for seed in (0, 1)]
    (simulated,) = [row for row in cells if row[0] == "fedavg-seed2" and "finished" in row]
    assert simulated[5:7] == ["", ""]


def test_a_simulation_has_neither_nodes_nor_times(make_run):
    text = render([make_run()])
    assert "Nodes of the clients" not in text
    assert "first round began" not in text


def test_a_large_federation_shows_the_first_nodes_and_says_so(make_run, monkeypatch):
    monkeypatch.setattr(federations, "MOST_NODES", 2)
    text = render([make_run(accuracy=[0.1], who=federation)])
    assert "1 more in the run folders" in text
    assert ">19</td>" not in text


@pytest.mark.parametrize(
    "broken",
    [{"nodes": [1, 2]}, {"nodes": {"a": 3}}, {"nodes": {"0": "<u>"}}, {"nodes": {"0": None}}, {"nodes": {"-1": 1}},
     {"nodes": {"9" * 5000: 1}}, {"time": "<u>now</u>"}, {"time": 7}, {"time": "0001-01-01T00:00:00+14:00"},
     {"nodes": {"0": 1}, "quarantined": "all"}],
)  # fmt: skip
def test_garbled_nodes_and_times_do_no_harm(make_run, broken):
    text = render([make_run(accuracy=[0.1], who=lambda t: {"participants": [0], **broken})])
    assert not Page(text).all("u")
