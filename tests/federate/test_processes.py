"""No process is left behind: not by an end, not by an error, not by Ctrl-C, not when the one that started them dies."""

import os
import signal
import subprocess
import sys

import pytest

from deployments import wait_until
from feddpc.errors import BadInputError
from feddpc.federate.processes import MARK, ProcessError, ProcessGroup, marked, relevant_lines

#: A process that starts another in a session of its own, which is how Flower does it, and an orphan.
FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep, start_new_session=True)
subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"])
open("settled", "w").close()
time.sleep(600)
"""


def start_family(processes, tmp_path):
    process = processes.start("family", [sys.executable, "-c", FAMILY], tmp_path, os.environ)
    # Before it has settled there are three too: the orphan's parent in place of the orphan.
    wait_until(lambda: (tmp_path / "settled").exists() and len(marked(processes.mark)) == 3)
    return process


def test_children_grandchildren_and_orphans_are_gone_at_the_end(tmp_path):
    with ProcessGroup(str(tmp_path), tmp_path / "logs") as processes:
        start_family(processes, tmp_path)
    assert marked(str(tmp_path)) == []


def test_also_after_an_error(tmp_path):
    def fail():
        with ProcessGroup(str(tmp_path), tmp_path / "logs") as processes:
            start_family(processes, tmp_path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert marked(str(tmp_path)) == []


def test_a_folder_in_use_is_left_alone(tmp_path):
    with ProcessGroup(str(tmp_path), tmp_path / "logs") as processes:
        start_family(processes, tmp_path)
        with (
            pytest.raises(BadInputError, match="is in use by 3 processes of another federation"),
            ProcessGroup(str(tmp_path), tmp_path / "logs"),
        ):
            pass
        assert len(marked(str(tmp_path))) == 3


def test_others_are_left_alone(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: "other"})
    try:
        with ProcessGroup(str(tmp_path), tmp_path / "logs") as processes:
            start_family(processes, tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_what_was_started_dies_with_the_process_that_started_it(tmp_path):
    script = f"""
import os, sys, time
from pathlib import Path
from feddpc.federate.processes import ProcessGroup
folder = Path({str(tmp_path)!r})
with ProcessGroup(str(folder), folder / "logs") as processes:
    processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], folder, os.environ)
    time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: len(marked(str(tmp_path))) == 1)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_until(lambda: marked(str(tmp_path)) == [])


def test_a_failure_shows_the_telling_part_of_the_log(tmp_path):
    script = "print('long ago'); raise ValueError('the dog ate it')"
    with ProcessGroup(str(tmp_path), tmp_path / "logs") as processes:
        process = processes.start("Super Thing", [sys.executable, "-c", script], tmp_path, os.environ)
        process.handle.wait()
        error = process.failure()
    assert isinstance(error, ProcessError)
    text = str(error)
    assert text.startswith("the Super Thing ended with code 1; its log")
    assert "Super-Thing.log" in text
    assert text.endswith("ValueError: the dog ate it")
    assert "long ago" not in text


def test_the_exception_and_the_error_are_shown_and_nothing_else():
    log = """INFO :      begin
Traceback (most recent call last):
  File "x.py", line 3, in main
feddpc.errors.BadInputError: unknown method 'x'
ERROR :     Exit Code: 601

ServerApp failed.
2026-11-15T19:48:10.737Z INFO [uvicorn.error] Shutting down
INFO :      end
"""
    assert relevant_lines(log).splitlines() == [
        "  feddpc.errors.BadInputError: unknown method 'x'",
        "  ERROR :     Exit Code: 601",
        "  ServerApp failed.",
    ]


def test_of_a_log_without_trouble_the_end_is_shown():
    assert relevant_lines("".join(f"line {i}\n" for i in range(9))).splitlines() == [f"  line {i}" for i in range(4, 9)]
    assert relevant_lines("") == "  (nothing)"
