"""Sweeps in several processes, killed at any moment, and several sweeps at a time on one folder."""

import os
import random
import signal
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from feddpc.runs.stop import Stop
from feddpc.study import Processes, run_study, workers
from feddpc.study.workers import RunBatch, run_batch
from forked import Forked
from sweeping import numbers, records, specs, thirty_rounds


@pytest.fixture
def script(tmp_path):
    started = []

    def start(folder, processes=0):
        started.append(Forked(thirty_rounds, str(folder), processes, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What comes of the sweep when nobody disturbs it: its numbers and its records."""
    folder = tmp_path_factory.mktemp("whole")
    return numbers(run_study(specs(rounds=30), folder)), records(folder)


def wait_for_rounds(folder, count, process):
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if sum(path.read_bytes().count(b"\n") for path in folder.glob("items/*/rounds.jsonl")) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"there were never {count} rounds: {process.communicate()}")


def test_killed_at_random_moments_and_continued(tmp_path, script, whole):
    """Byte for byte the records of an uninterrupted sweep, but for the seconds."""
    wanted = specs(rounds=30)
    chance = random.Random(5)
    for low in (0, 60):
        process = script(tmp_path / "cut")
        wait_for_rounds(tmp_path / "cut", low + chance.randrange(5, 40), process)
        time.sleep(chance.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cut = run_study(wanted, tmp_path / "cut")
    assert numbers(cut) == whole[0]
    assert records(tmp_path / "cut") == whole[1]
    assert not (tmp_path / "cut" / "damaged").exists()  # what was cut off could be continued


def test_two_sweeps_at_a_time_share_one_folder(tmp_path, script, whole):
    wanted = specs(rounds=30)
    both = [script(tmp_path / "both") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert numbers(run_study(wanted, tmp_path / "both")) == whole[0]
    assert records(tmp_path / "both") == whole[1]
    assert not (tmp_path / "both" / "damaged").exists()


def test_processes_give_what_one_process_gives_also_when_one_is_killed(tmp_path, whole):
    wanted = specs(rounds=30)
    victims = []

    def kill_one(progress):
        """Kill the first worker that is seen at work."""
        if progress.rounds > 5 and not victims:
            victims.extend(p for p in _children() if is_alive(p))
            os.kill(victims[0], signal.SIGKILL)

    outcomes = run_study(
        wanted, tmp_path / "apart", workers=Processes(2), on_progress=kill_one, checkpoint_seconds=0.01
    )
    assert len(victims) == 2
    assert numbers(outcomes) == whole[0]
    assert records(tmp_path / "apart") == whole[1]
    assert not [p for p in _children() if is_alive(p)]


def is_alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children():
    import multiprocessing

    return [process.pid for process in multiprocessing.active_children()]


def test_workers_of_a_killed_sweep_go_home(tmp_path, script):
    process = script(tmp_path / "s", processes=1)
    wait_for_rounds(tmp_path / "s", 2, process)
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers_of = [int(pid) for pid in task.read_text().split()]
    assert workers_of
    process.kill()
    process.communicate()
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in workers_of) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in workers_of)
    assert numbers(run_study(specs(rounds=30), tmp_path / "s"))[0][1] == "done"


def test_a_worker_that_dies_again_and_again_gives_the_item_up(tmp_path, monkeypatch):
    class Doomed(workers.WorkerPool):
        size = 1
        deaths = (ChildProcessError,)

        def submit(self, batch):
            dead = Future()
            dead.set_exception(ChildProcessError("killed by SIGKILL"))
            return dead

    class Dooming(workers.Workers):
        def open(self, stop, tick):
            return Doomed()

    (outcome,) = run_study(specs()[:1], tmp_path, workers=Dooming())
    assert outcome.status == "failed"
    assert "died 3 times" in outcome.message
    assert "killed by SIGKILL" in outcome.message


def test_a_wish_to_stop_reaches_the_processes(tmp_path):
    stop = Stop()

    def enough(progress):
        stop.wanted = progress.rounds > 5

    outcomes = run_study(specs(rounds=3000), tmp_path, workers=Processes(1), on_progress=enough, stop=stop)
    assert [o.status for o in outcomes] == ["missing"] * 4
    assert 5 < max(o.rounds for o in outcomes) < 3000
    (begun,) = [o for o in outcomes if o.rounds]
    assert f"{begun.rounds} of 3000 rounds" in begun.message
    assert (begun.path / "checkpoint" / "checkpoint.json").exists()


def test_a_batch_that_is_stopped_says_what_was_not_begun(tmp_path):
    stop = Stop()
    stop.wanted = True
    given = RunBatch(tuple(specs()[:2]), tmp_path)
    assert [report.state for report in run_batch(given, stop=stop)] == ["interrupted", "interrupted"]


def test_how_many_processes():
    from feddpc.errors import BadInputError

    with pytest.raises(BadInputError, match="processes = 0"):
        Processes(0)
    with pytest.raises(BadInputError, match="at_once = 0"):
        Processes(2, at_once=0)


def test_control_c_does_not_reach_the_processes(tmp_path):
    """A terminal sends it to all; only the sweep itself is to act on it."""
    sent = []

    def interrupt(progress):
        if progress.rounds > 5 and progress.running and not sent:
            sent.extend(_children())
            for pid in sent:
                os.kill(pid, signal.SIGINT)

    outcomes = run_study(specs(rounds=200)[:1], tmp_path, workers=Processes(1), on_progress=interrupt)
    assert len(sent) == 1
    assert [o.status for o in outcomes] == ["done"]
    assert not (tmp_path / "failed").exists()
