"""`feddpc federate demo` from the first line to the last, and interrupted on its way: no process is left behind."""

import os
import signal
import subprocess
import sys

import pytest

from deployments import wait_until
from feddpc.federate.processes import marked
from feddpc.runs.record import read_records

pytestmark = pytest.mark.processes

ENVIRONMENT = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def demo(mark):
    """Start the demo in the folder ``mark``."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "feddpc", "federate", "demo", "--out", str(mark), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_to(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(mark, demo, how):
    process = demo("--nodes", "1", "--tls")
    read_to(process, "training")
    assert len(marked(str(mark))) >= 2
    process.send_signal(how)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == ""
    assert out.splitlines()[-1] == f"continue: feddpc federate demo --tls --nodes 1 --out {mark} --resume"
    assert marked(str(mark)) == []


def test_a_demo_whose_terminal_is_closed_leaves_no_process(mark, demo):
    process = demo("--nodes", "1")
    read_to(process, "training")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == -signal.SIGHUP
    wait_until(lambda: marked(str(mark)) == [], seconds=30)


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process_and_is_continued(mark, demo, simulated):
    process = demo("--nodes", "2", "--rounds", "2")
    wait_until(lambda: process.poll() is not None or len(read_records(mark / "run" / "rounds.jsonl")) >= 1)
    assert process.poll() is None
    process.kill()
    wait_until(lambda: marked(str(mark)) == [], seconds=30)
    before = read_records(mark / "run" / "rounds.jsonl")
    assert len(before) < 2

    again = demo("--nodes", "2", "--rounds", "2", "--resume")
    out, err = again.communicate(timeout=300)
    assert (again.returncode, err) == (0, "")
    assert marked(str(mark)) == []
    records, expected = read_records(mark / "run" / "rounds.jsonl"), simulated(clients=2, cohort=2, rounds=2).records
    assert records[: len(before)] == before
    assert [r["test_accuracy"] for r in records] == [r["test_accuracy"] for r in expected]
    assert "feddpc seed 0  round 2/2" in out
    assert out.count("█") > 20
    assert (mark / "curves.png").stat().st_size > 1000
