"""Waiting for processes, and finding them."""

import time
from pathlib import Path

from feddpc.federate.processes import marked


def wait_until(holds, seconds=120.0):
    """Wait for something to come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.05)


def running(mark, program):
    """Return the processes of a federation that run one of Flower's programs."""
    found = []
    for pid in marked(str(mark)):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"/{program}\0".encode() in command:
            found.append(pid)
    return found
