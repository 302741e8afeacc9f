"""Flower's programs as processes with one log each, all of which end when the federation ends.

Every process that is started here has a mark in its environment, and so have its children. At the end all processes
with the mark are killed, whatever their parents are by then. If this process itself is killed, Linux ends those that it
started, and Flower's processes watch their parents and end too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from feddpc.errors import BadInputError, FeddpcError
from feddpc.launch import end_with_parent
from feddpc.storage import explain_os_errors

MARK = "FEDDPC_FEDERATION"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"(ERROR|CRITICAL)\b")
_OTHER = re.compile(r"(INFO|WARNING|DEBUG)\b|\d{4}-\d\d-\d\dT")
_RAISED = re.compile(r"[\w.]+(Error|Exception)\b")
#: Known errors in Flower's logs, in lower case, and what they mean.
_MEANINGS = {
    "failed to activate supernode": "the SuperLink does not know its key: register it with `flwr supernode register`; "
    "or it was killed less than a minute ago, and the SuperLink has not noticed yet",
    "certificate_verify_failed": "it does not trust the server's certificate: `feddpc federate check` says why",
    "address already in use": "another program uses its port",
}

#: Flower neither reports, looks for updates nor installs packages.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",  # one machine runs all nodes
}


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
        """Return what it has written so far, without colors."""
        return plain_text(self.log.read_bytes()[self.begin :])

    def failure(self, what: str | None = None) -> ProcessError:
        """Return the error for this process: what happened, and the relevant part of its log."""
        what = what or f"ended with code {self.handle.poll()}"
        text = self.text()
        return ProcessError(
            f"the {self.name} {what}{explain_log(text)}; its log {self.log} says:\n{relevant_lines(text)}"
        )

    def kill(self) -> None:
        """Kill it at once, as a power failure would."""
        self.handle.kill()
        self.handle.wait()


def plain_text(output: bytes) -> str:
    """Return what a program wrote, without colors."""
    return _COLORS.sub("", output.decode(errors="replace"))


def relevant_lines(text: str, most: int = 8) -> str:
    """Return the relevant part of a log: the last exception and the last error, or else its end.

    >>> print(relevant_lines("INFO: begin\\nERROR: no key\\nSee the manual.\\nINFO: bye\\n"))
      ERROR: no key
      See the manual.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    errors = [i for i, line in enumerate(lines) if _ERROR.match(line)][-1:]
    block = [line for i in errors for line in takewhile(lambda line: not _OTHER.match(line), lines[i:])]
    shown = [line for line in raised if line not in block] + block[:most] or lines[-5:]
    return "\n".join(f"  {line}" for line in shown) or "  (nothing)"


def explain_log(text: str) -> str:
    """Explain a known error in a log, in parentheses; return an empty text if there is none.

    >>> explain_log("oh: Address already in use")
    ' (another program uses its port)'
    """
    return next((f" ({words})" for sign, words in _MEANINGS.items() if sign in text.lower()), "")


class ProcessGroup:
    """The processes of one federation, to be used in a ``with`` block.

    Args:
        mark: what distinguishes them from those of other federations.
        logs: the folder for their logs.
    """

    def __init__(self, mark: str, logs: Path) -> None:
        self.mark, self.logs = mark, logs
        self.started: list[Process] = []

    def __enter__(self) -> ProcessGroup:
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
        """Start a program, given by its full path; its output is appended to ``NAME.log``."""
        log = self.logs / f"{name.replace(' ', '-')}.log"
        with explain_os_errors(log), log.open("ab") as out:
            begin = out.tell()
            handle = subprocess.Popen(
                [*end_with_parent(), *command],
                cwd=cwd,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others
            )
        process = Process(name, handle, log, begin)
        self.started.append(process)
        return process

    def stop(self, seconds: float = 10.0) -> None:
        """Kill all processes with the mark, and wait until they have ended."""
        end = time.monotonic() + seconds
        while True:
            remaining = marked(self.mark)
            for pid in remaining:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.kill()
            if not remaining or time.monotonic() > end:
                return
            time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Return the running processes with a mark; none on systems without ``/proc``."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return pids


def program(name: str) -> str:
    """Return the full path of one of Flower's programs, which are next to this Python's."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise BadInputError(f"the program {name} is not installed: pip install 'flwr>=1.41,<1.43'")
    return str(Path(path).resolve())


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a program; ``home`` is its own folder for Flower, which unpacks apps there."""
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])  # Flower starts its parts by name
    own = {"PATH": path, "FLWR_HOME": str(home)}
    if found := os.environ.get("PYTHONPATH"):
        own["PYTHONPATH"] = os.pathsep.join(str(Path(part).resolve()) for part in found.split(os.pathsep))
    return {**os.environ, **QUIET, **own}
