"""Keeps a run going: submits it, watches it, and submits it again when it fails, until it is finished.

A run that is submitted again continues from its checkpoint, as long as the app's configuration has a ``folder``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from feddpc.errors import BadInputError, FeddpcError
from feddpc.federate.flower_cli import FlowerCli, FlowerCliError
from feddpc.federate.processes import ProcessError, explain_log, relevant_lines
from feddpc.runs.stop import Stop
from feddpc.storage import explain_os_errors, replace_text

COMPLETED = "finished:completed"
FINISHED = "finished"
#: Somebody stopped the run on purpose, so it is not submitted again.
STOPPED = "finished:stopped"
#: The SuperLink's code for a run that it does not know, as after a start without its database.
RUN_NOT_FOUND = 16


class GaveUpError(ProcessError):
    """Too many failures in a row; a restart of the supervisor would only repeat them."""


@dataclass
class Supervisor:
    """Submits an app until a run of it completes.

    Args:
        app: the app's folder.
        connection: the SuperLink's name in Flower's ``config.toml``.
        config: overrides of the app's configuration, as ``flwr run --run-config`` takes them.
        failures: failures in a row after which it gives up; a SuperLink that does not answer is one per attempt.
        wait: seconds before the first new attempt, doubled with every further failure in a row.
        longest_wait: the longest wait in seconds.
        poll: seconds between two looks at the run.
        run_folder: the run's folder; a new round in it sets the count of failures to zero.
        state: a file for the run's id, so that a supervisor that was killed goes on watching its run.
        stop: a request to stop, which stops the run too.
        tell: shows a line of progress.
        link: calls Flower; for tests.
    """

    app: Path
    connection: str
    config: list[str] = field(default_factory=list)
    failures: int = 5
    wait: float = 10.0
    longest_wait: float = 600.0
    poll: float = 5.0
    run_folder: Path | None = None
    state: Path | None = None
    stop: Stop = field(default_factory=Stop)
    tell: Callable[[str], object] = lambda _: None
    link: FlowerCli | None = None

    def run(self) -> None:
        """Return when a run has completed or somebody stopped it; raise if it gave up, or was asked to stop."""
        if not (self.app / "pyproject.toml").is_file():
            raise BadInputError(f"{self.app} is no Flower app: it has no pyproject.toml")
        link = self.link or FlowerCli(self.connection, stop=self.stop)
        reasons: list[str] = []
        rounds = self._rounds()
        current = self._recall()
        try:
            while True:
                try:
                    if current is None:
                        current = link.submit(self.app, self.config)
                        self._remember(current)
                        self.tell(f"run {current}: submitted")
                    else:
                        self.tell(f"run {current}: watched again")
                    status = self._watch(link, current)
                    if status == COMPLETED:
                        self.tell(f"run {current}: completed{self._progress()}")
                        self._forget()
                        return
                    if status == STOPPED:
                        self.tell(f"run {current}: was stopped{self._progress()}; the same command continues it")
                        self._forget()
                        return
                    reason, current = self._why(link, current, status), None
                except FlowerCliError as error:
                    reason = f"{error}{explain_log(str(error))}"
                    if error.code == RUN_NOT_FOUND:
                        current = None
                if self._rounds() > rounds:  # it got further, so the failures before are over
                    rounds, reasons = self._rounds(), []
                reasons.append(reason)
                if len(reasons) >= self.failures:
                    self._forget()
                    raise GaveUpError(
                        f"{len(reasons)} failures in a row{self._progress()}; the last one: {reason}. Remove the cause "
                        "and start again: the run continues from its checkpoint"
                    )
                pause = min(self.wait * 2 ** (len(reasons) - 1), self.longest_wait)
                self.tell(f"failure {len(reasons)} of {self.failures}: {reason}")
                self.tell(f"next attempt in {pause:g} s{self._progress()}")
                self._pause(pause)
        except KeyboardInterrupt:
            if current is not None:
                with suppress(FlowerCliError):
                    link.stop_run(current)
                    self.tell(f"run {current}: stopped{self._progress()}; the same command continues it")
            self._forget()
            raise

    def _watch(self, link: FlowerCli, run: str) -> str:
        """Return the status with which a run ended; a SuperLink that is gone for a while is waited for."""
        silent = 0
        while True:
            try:
                status, silent = link.status(run), 0
            except FlowerCliError as error:
                silent += 1
                if error.code is not None or silent >= self.failures:
                    raise
                self.tell(f"run {run}: the SuperLink does not answer ({silent} of {self.failures})")
                self._pause(min(self.wait * 2 ** (silent - 1), self.longest_wait))
                continue
            if status.startswith(FINISHED):
                return status
            self._pause(self.poll)

    def _why(self, link: FlowerCli, run: str, status: str) -> str:
        """Return why a run failed, from its log."""
        try:
            log = link.log_of(run)
        except FeddpcError as error:
            return f"run {run} is {status}, and its log cannot be read ({error})"
        lines = " | ".join(line.strip() for line in relevant_lines(log).splitlines())
        return f"run {run} is {status}{explain_log(log)}: {lines}"

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.stop.wanted:
                raise KeyboardInterrupt
            time.sleep(min(left, 0.1))

    # The run's folder, and the file with its id.

    def _rounds(self) -> int:
        if self.run_folder is None:
            return 0
        try:
            return (self.run_folder / "rounds.jsonl").read_bytes().count(b"\n")
        except OSError:  # it has not begun
            return 0

    def _progress(self) -> str:
        return "" if self.run_folder is None else f", {self._rounds()} rounds done"

    def _recall(self) -> str | None:
        if self.state is None or not self.state.exists():
            return None
        with explain_os_errors(self.state):
            run = self.state.read_text("utf-8", errors="replace").strip()
        if not run.isdecimal():
            raise BadInputError(f"{self.state} holds no id of a run: remove it, or choose another file")
        return run

    def _remember(self, run: str) -> None:
        if self.state is not None:
            replace_text(self.state, f"{run}\n")

    def _forget(self) -> None:
        if self.state is not None:
            self.state.unlink(missing_ok=True)
