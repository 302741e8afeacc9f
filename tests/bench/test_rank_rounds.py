"""`feddpc bench --ranks`: processes that share rounds take turns with engines of one process."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from feddpc.bench import rank_rounds, turns
from feddpc.bench.workloads import Workload
from feddpc.cli import app
from feddpc.errors import BadInputError
from feddpc.ranks import ALONE

SMALL = Workload("small", "small images, cnn", "cnn", 10, 8, 2000, test=100)


@pytest.mark.processes
def test_ranks_take_turns_with_engines():
    found = turns.time_rounds(SMALL, device="cpu", rounds=2, engines=["loop"], ranks=[1, 2])
    assert [(row["way"], row["turns"]) for row in found["rows"]] == [("loop", 2), ("1 rank", 2), ("2 ranks", 2)]
    assert all(row["round"] > 0 and row["training"] > 0 for row in found["rows"])
    assert found["compared_to"].startswith("loop")


@pytest.mark.processes
def test_ranks_that_cannot_run_are_a_line():
    found = turns.time_rounds(SMALL, device="cpu", rounds=1, engines=[], names=["fedfoo"], ranks=[2])
    row = found["rows"][-1]
    assert row["way"] == "2 ranks"
    assert "fedfoo" in row["error"]


@pytest.mark.processes
def test_ranks_that_torchrun_has_started_are_measured_as_they_are(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "feddpc", "bench"]
    words = ["--quick", "--workload", "text-transformer", "--methods", "fedavg", "--rounds", "1", "--device", "cpu"]
    out = tmp_path / "bench.json"
    done = subprocess.run([*command, *words, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["way"] for row in found["workloads"][0]["rows"]] == ["2 ranks"]
    assert done.stdout.count("figures:") == 1, "one rank prints"


def test_joined_ranks_all_take_the_turns_that_were_asked_for():
    found = turns.time_joined(SMALL, ALONE, device="cpu", rounds=3, names=["fedavg", "feddpc"])
    assert [(row["way"], row["method"], row["turns"]) for row in found["rows"]] == [
        ("1 rank", "fedavg", 3),
        ("1 rank", "feddpc", 3),
    ]


def test_ranks_end_with_what_is_measured():
    entrant = rank_rounds.RanksEntrant.__new__(rank_rounds.RanksEntrant)
    entrant._processes = rank_rounds.start(2, [sys.executable, "-c", "import time; time.sleep(100)"], 1)
    entrant.close()
    assert all(process.returncode for process in entrant._processes)


@pytest.mark.parametrize("text", ["0", "1,two", "-1"])
def test_numbers_of_ranks_are_checked(text):
    done = CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", "--ranks", text])
    assert isinstance(done.exception, BadInputError)
