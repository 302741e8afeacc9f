"""Runs, sweeps and federations that are killed, lose power or meet a failing disk at every call that changes a file.

The suite takes a few points of each kind; ``pytest -m slow tests/crash`` takes all of them. What was tried and what
came of it is written to ``reports/kill-points-*.json`` (or below $FEDDPC_REPORTS).
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from crash.disk import CUTS, ERRORS, KILLS
from crash.driver import DONE, REFUSED
from feddpc import __version__

HERE = Path(__file__).parent
REPORTS = Path(os.environ.get("FEDDPC_REPORTS", HERE.parents[1] / "reports"))
INDEX = "checkpoint/checkpoint.json"


class Crashes:
    """A driver process, and what it found."""

    def __init__(self, world: str, place: Path) -> None:
        self.world, self.points, self.began = world, [], time.monotonic()
        command = [sys.executable, str(HERE / "driver.py"), world, str(place)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.calls = [tuple(call) for call in self._answer()["calls"]]

    def _answer(self):
        text = self.process.stdout.readline()
        assert text, f"the driver died with {self.process.wait()}"
        return json.loads(text)

    def at(self, number, end):
        """Try one point, and check that nothing was lost that had been complete, and the end is the same."""
        self.process.stdin.write(json.dumps([number, end]) + "\n")
        self.process.stdin.flush()
        found = self._answer()
        call, path = self.calls[number - 1] if end != "kill at random" else ("a moment", f"{number:.3f}")
        point = {"end": end, "call": call, "path": path, "number": number, "kept": found["kept"]}
        told = f"{self.world}, {end} at call {number} ({call} {path}): {found}"
        if end in ERRORS:
            # Now and then a call need not succeed: a folder to be made is there.
            assert found["first"] in (REFUSED, DONE), told
            assert found["first"] == DONE or "cannot be used" in found["said"] or "is full" in found["said"], told
        else:
            assert found["first"] in (-9, *([DONE] if end == "kill at random" else [])), told
        assert found["again"] == DONE, told
        assert not found["wrong"], told
        if self.world != "sweep" and end != "kill at random":
            assert found["kept"] >= self._complete(number, end), told
        outcome = {REFUSED: "refused", DONE: "went on"}.get(found["first"], "killed")
        self.points.append({**point, "outcome": f"{outcome}, continued, equal"})

    def _complete(self, number, end):
        """Return the round of the last checkpoint that must be there: in place, and left behind if power may fail."""
        before = self.calls[: number - 1]
        places = [i for i, (call, path) in enumerate(before) if call == "replace" and path.endswith(INDEX)]
        if end in CUTS:
            later = [i for i, (call, path) in enumerate(before) if call == "write" and path.endswith("rounds.jsonl")]
            places = [i for i in places if later and later[-1] > i]
        return max(0, len(places) - 1)  # the first one says only that no round is complete yet

    def close(self, name):
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()
        REPORTS.mkdir(exist_ok=True)
        by_end = Counter(point["end"] for point in self.points)
        report = {
            "world": self.world,
            "date": time.strftime("%Y-%m-%d"),
            "versions": {
                "feddpc": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "flwr": version("flwr"),
            },
            "seconds": round(time.monotonic() - self.began),
            "calls": len(self.calls),
            "points": len(self.points),
            "by end": dict(by_end),
            "by outcome": dict(Counter(point["outcome"] for point in self.points)),
        }
        text = ",\n  ".join(json.dumps(point) for point in self.points)
        head = json.dumps(report, indent=1).removesuffix("\n}")
        path = REPORTS / f"kill-points-{self.world.replace(' ', '-')}-{name}.json"
        path.write_text(f'{head},\n "tried": [\n  {text}\n ]\n}}\n')


@pytest.fixture
def crashes(tmp_path, request):
    opened = []

    def begin(world):
        opened.append(Crashes(world, tmp_path))
        return opened[-1]

    yield begin
    name = "all" if request.node.get_closest_marker("slow") else "few"
    for one in opened:
        one.close(name)


def few(calls, count, seed):
    """Some call numbers, spread over the whole run."""
    rng, width = random.Random(seed), len(calls) / count
    return [1 + int(i * width + rng.random() * width) for i in range(count)]


def by_turns(ends, number):
    """The end for this call; the next call has the next one."""
    return ends[number % len(ends)]


def at_moments(world, count):
    rng = random.Random(7)
    for _ in range(count):
        world.at(rng.random(), "kill at random")


def test_a_run_at_some_calls_and_moments(crashes):
    world = crashes("scaffold on disk")
    for seed, end in enumerate((*KILLS, *CUTS)):
        for number in few(world.calls, 4, seed):
            world.at(number, end)
    for seed, end in enumerate(ERRORS[:2]):
        world.at(*few(world.calls, 1, seed), end)
    at_moments(world, 3)
    assert len(world.points) >= 20


def test_a_run_that_keeps_its_best_model_at_some_calls(crashes):
    world = crashes("best of fedavg on device")
    for seed, end in enumerate((*KILLS, *CUTS)):
        world.at(*few(world.calls, 1, seed), end)
    at_moments(world, 2)


@pytest.mark.parametrize("memory", ["device", "disk"])
def test_two_ranks_at_some_calls(crashes, memory):
    world = crashes(f"scaffold on {memory} by two ranks")
    for seed, end in enumerate((*KILLS, *CUTS, "ENOSPC")):
        world.at(*few(world.calls, 1, seed), end)
    at_moments(world, 1)


def test_a_sweep_at_some_calls(crashes):
    world = crashes("sweep")
    for seed, end in enumerate(("kill in the middle", "power cut with names", "EROFS")):
        world.at(*few(world.calls, 1, seed), end)


def test_a_federation_at_some_calls(crashes):
    world = crashes("federation of scaffold")
    for seed, end in enumerate((*KILLS, *CUTS)):
        world.at(*few(world.calls, 1, seed), end)
    listed = [i for i, (call, path) in enumerate(world.calls, 1) if path == "run/refused.jsonl" and call == "write"]
    world.at(listed[-1], "kill in the middle")
    world.at(listed[-1], "ENOSPC")


@pytest.mark.slow
def test_a_run_at_every_call_in_every_way(crashes):
    """At every write, sync, rename and removal from the first to the last; and at fifty moments."""
    world = crashes("scaffold on disk")
    for end in (*KILLS, *CUTS, *ERRORS):
        for number in range(1, len(world.calls) + 1):
            world.at(number, end)
    at_moments(world, 50)
    assert len(world.points) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("world", ["fedvarp on device", "gmm on host"])
def test_a_run_at_every_call(crashes, world):
    """Other memories, and what is found out before round 1: at every call in one way after the other."""
    world = crashes(world)
    for number in range(1, len(world.calls) + 1):
        world.at(number, by_turns((*KILLS, *CUTS, *ERRORS), number))
    at_moments(world, 20)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["scaffold on disk by two ranks", "fedvarp on device by two ranks"])
def test_two_ranks_at_every_call(crashes, world):
    """At every call of either rank, in one way after the other."""
    world = crashes(world)
    for number in range(1, len(world.calls) + 1):
        world.at(number, by_turns((*KILLS, *CUTS, *ERRORS), number))
    at_moments(world, 10)
    assert len(world.points) >= 100


@pytest.mark.slow
def test_a_sweep_at_every_fourth_call(crashes):
    world = crashes("sweep")
    for offset, end in enumerate((*KILLS, *CUTS, *ERRORS[:2])):
        for number in range(1 + offset % 4, len(world.calls) + 1, 4):
            world.at(number, end)
    at_moments(world, 30)
    assert len(world.points) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("world", ["federation of scaffold", "federation of gmm"])
def test_a_federation_at_every_call(crashes, world):
    """At every call of server and clients, in one way after the other.

    A client whose disk fails says so, and the round goes on without it: that is no loss, but another run.
    """
    world = crashes(world)
    for number, (_, path) in enumerate(world.calls, 1):
        ends = (*KILLS, *CUTS, *ERRORS) if path.startswith("run") else (*KILLS, *CUTS)
        world.at(number, by_turns(ends, number))
    at_moments(world, 10)
    assert len(world.points) >= 50
