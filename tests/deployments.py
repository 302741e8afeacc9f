"""Waiting for processes, finding them, and killing and restarting those of a deployment."""

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


def kill_node(deployment, number):
    """Kill a SuperNode, as a power failure would."""
    deployment.supernodes.pop(number).kill()


def kill_superlink(deployment):
    """Kill the SuperLink, as a power failure would."""
    deployment.superlink.kill()
    deployment.superlink = None


def restart_node(deployment, number):
    """Start a killed SuperNode; the SuperLink accepts it once it has noticed the loss, within a minute."""
    end = time.monotonic() + 120.0
    while True:
        process = deployment.start_node(number)
        while not process.ended:
            if "SuperNode ID" in process.text():
                return
            deployment.pause(0.1)
        assert time.monotonic() < end, process.failure()
        deployment.pause(5.0)
