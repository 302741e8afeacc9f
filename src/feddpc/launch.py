"""Starting several processes of this machine that share a run, as torchrun does, and ending them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

#: Seconds in which ranks can say what another one's end means for them, before they are ended too.
GRACE = 10.0
#: Seconds between two looks at the processes.
POLL = 0.05
#: In the environment of ranks that were started together: a folder in which one of them notes what it prints for all.
PRINTED = "FEDDPC_PRINTED"
#: Becomes the command in its arguments, which Linux then ends when its parent ends (PR_SET_PDEATHSIG = 1).
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):  # else the parent has already ended
    os.execv(sys.argv[2], sys.argv[2:])
"""


def end_with_parent() -> list[str]:
    """Return the start of a command line that makes a command end with this process, where the system can do that."""
    # A function between fork and exec would also do, but would lose interrupts that come then.
    return (
        [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())]
        if sys.platform.startswith("linux")
        else []
    )


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of one of ``size`` ranks on this machine."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // size))}
    return {**threads, **os.environ, **{k: str(v) for k, v in own.items()}, "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port of this machine at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def launch(
    size: int, command: Sequence[str], *, stopping: Callable[[], bool] = lambda: False, output: IO[bytes] | None = None
) -> int:
    """Run a command as ``size`` ranks and return the exit code of the first one that fails, or 0.

    The first Ctrl-C or SIGTERM is passed on, so that the ranks stop after their round; the second one ends them. A
    caller with handlers of its own says through ``stopping`` that they are to stop. ``output`` gets what they print.
    """
    port, printed = free_port(), tempfile.TemporaryDirectory(prefix="feddpc-ranks-")
    ranks = [
        subprocess.Popen(
            [*end_with_parent(), *command],
            env=environment(rank, size, port) | {PRINTED: printed.name},
            stdout=output,
            stderr=output,
            start_new_session=True,  # signals of the terminal reach this process only, which passes them on once
        )
        for rank in range(size)
    ]

    def pass_on(number: int, _: FrameType | None = None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    own = output is None and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)} if own else {}
    try:
        return _wait(ranks, stopping, lambda: pass_on(signal.SIGINT))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        printed.cleanup()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], stopping: Callable[[], bool], stop: Callable[[], None]) -> int:
    failed, until, asked = 0, float("inf"), False
    while True:
        if not asked and stopping():
            asked = True
            stop()
        codes = [rank.poll() for rank in ranks]
        failed = failed or next((code for code in codes if code), 0)
        if failed and until == float("inf"):
            until = time.monotonic() + GRACE
        if None not in codes or time.monotonic() > until:
            return failed if failed >= 0 else 128 - failed
        time.sleep(POLL)
