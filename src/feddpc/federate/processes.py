"""Processes that do not outlive their purpose: started with a log each, and all gone at the end, come what may.

Everything that is started here carries a mark in its environment, and so does everything that it starts itself. At the
end whatever carries the mark is killed, whoever its parent is by then. Where this process is killed itself, Linux ends
those that it started, and Flower's processes watch their parents and follow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from feddpc.errors import BadInputError, FeddpcError
from feddpc.storage import explain_os_errors

MARK = "FEDDPC_FEDERATION"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"(ERROR|CRITICAL)\b")
_OTHER = re.compile(r"(INFO|WARNING|DEBUG)\b|\d{4}-\d\d-\d\dT")
_RAISED = re.compile(r"[\w.]+(Error|Exception)\b")
#: Signs of trouble in Flower's logs, in small letters, and what they mean.
_MEANINGS = {
    "failed to activate supernode": "the SuperLink does not know its key: register it with `flwr supernode register`; "
    "or it was killed less than a minute ago, and the SuperLink has not noticed yet",
    "certificate_verify_failed": "it does not trust the server's certificate: `feddpc federate check` says why",
    "address already in use": "another program uses its port",
}
#: Becomes the command behind it, which Linux then ends when the process that started it does (PR_SET_PDEATHSIG = 1).
_LEASH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):  # else it went in between
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ProcessError(FeddpcError):
    """A process of the federation failed; the message holds what its log says."""


@dataclass(frozen=True)
class Process:
    """A process and its log."""

    name: str
    handle: subprocess.Popen[bytes]
    log: Path
    begin: int  #: where its part of the log begins

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.handle.poll() is not None

    def text(self) -> str:
        """Return what it has written so far, without colours."""
        return _COLOURS.sub("", self.log.read_bytes()[self.begin :].decode(errors="replace"))

    def failure(self, what: str | None = None) -> ProcessError:
        """Return the error for this process: what happened, and the telling part of its log."""
        what = what or f"ended with code {self.handle.poll()}"
        text = self.text()
        return ProcessError(f"the {self.name} {what}{meaning(text)}; its log {self.log} says:\n{telling(text)}")

    def kill(self) -> None:
        """Kill it, as a loss of power would."""
        self.handle.kill()
        self.handle.wait()


def telling(text: str, most: int = 8) -> str:
    """Return the part of a log that says what went wrong: the last exception and the last error, or else its end.

    >>> print(telling("INFO: begin\\nERROR: no key\\nSee the manual.\\nINFO: bye\\n"))
      ERROR: no key
      See the manual.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    errors = [i for i, line in enumerate(lines) if _ERROR.match(line)][-1:]
    block = [line for i in errors for line in takewhile(lambda line: not _OTHER.match(line), lines[i:])]
    shown = [line for line in raised if line not in block] + block[:most] or lines[-5:]
    return "\n".join(f"  {line}" for line in shown) or "  (nothing)"


def meaning(text: str) -> str:
    """Return what is known about the trouble in a log, in plain words, with a blank before it.

    >>> meaning("oh: Address already in use")
    ' (another program uses its port)'
    """
    return next((f" ({words})" for sign, words in _MEANINGS.items() if sign in text.lower()), "")


class Processes:
    """The processes of one federation, to be used in a ``with`` block.

    Args:
        mark: what sets them apart from those of other federations.
        logs: the folder for their logs.
    """

    def __init__(self, mark: str, logs: Path) -> None:
        self.mark, self.logs = mark, logs
        self.started: list[Process] = []

    def __enter__(self) -> Processes:
        if others := marked(self.mark):
            raise BadInputError(
                f"{self.mark} is in use by {len(others)} processes of another federation: end that first"
            )
        with explain_os_errors(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Process:
        """Start a program, given by its full path; its log ``NAME.log`` goes on behind that of an earlier one."""
        log = self.logs / f"{name.replace(' ', '-')}.log"
        with explain_os_errors(log), log.open("ab") as out:
            begin = out.tell()
            handle = subprocess.Popen(
                [*_leash(), *command],
                cwd=cwd,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others
            )
        process = Process(name, handle, log, begin)
        self.started.append(process)
        return process

    def stop(self, seconds: float = 10.0) -> None:
        """Kill everything that carries the mark, and wait until it is gone."""
        end = time.monotonic() + seconds
        while True:
            found = marked(self.mark)
            for pid in found:
                _kill(pid)
            for process in self.started:
                process.kill()
            if not found or time.monotonic() > end:
                return
            time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Return the processes of a federation that are alive; none where the system has no ``/proc``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _leash() -> list[str]:
    """Return what goes before a command so that it ends with this process, where the system can do that."""
    # A function between fork and exec would do it too, but interrupts that come then are lost.
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid())] if sys.platform.startswith("linux") else []
