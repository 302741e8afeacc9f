"""Calls Flower's own command line for a SuperLink: register and remove nodes, submit, watch and stop runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from feddpc.errors import FeddpcError
from feddpc.federate.processes import QUIET, plain_text, program
from feddpc.launch import end_with_parent
from feddpc.runs.stop import Stop

_CODE = re.compile(r"\[code: (\d+)\] *(.*)")
#: Flower's codes of errors.
KEY_IN_USE, NODE_NOT_FOUND = 23, 24


class FlowerCliError(FeddpcError):
    """A call of Flower's command line failed; ``code`` is the SuperLink's, if it answered."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class FlowerCli:
    """Flower's command line for one SuperLink.

    Args:
        connection: the name of the SuperLink in Flower's ``config.toml``.
        environment: variables to set, such as FLWR_HOME.
        stop: a request to stop, which ends a call.
        timeout: seconds that a call may take.
    """

    def __init__(
        self,
        connection: str,
        *,
        environment: Mapping[str, str] | None = None,
        stop: Stop | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.connection, self.stop, self.timeout = connection, stop or Stop(), timeout
        quiet = {key: os.environ.get(key, value) for key, value in QUIET.items()}
        self.environment = {**os.environ, **quiet, **(environment or {})}

    # Nodes.

    def register(self, public_key: Path, name: str) -> str:
        """Register a node's public key, and return the node's id."""
        found = self.json("supernode", "register", str(public_key), self.connection, "--name", name)
        return str(found["node-id"])

    def unregister(self, node_id: str) -> None:
        """Remove a node: its key is refused from now on, and can never be registered again."""
        self.json("supernode", "unregister", node_id, self.connection)

    def nodes(self) -> dict[str, str]:
        """Return the status of every node by its id: registered, online, offline or unregistered."""
        found = self.json("supernode", "list", self.connection, "--verbose")
        return {str(node["node-id"]): str(node["status"]) for node in found["nodes"]}

    # Runs.

    def submit(self, app: Path, config: list[str]) -> str:
        """Submit an app, and return the id of the run; a request to stop waits, or nobody would know the run's id."""
        overrides = [part for text in config for part in ("--run-config", text)]
        return str(self._unstopped(self.timeout).json("run", str(app), self.connection, *overrides)["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run, such as ``running`` or ``finished:failed``."""
        return str(self.json("list", "--run-id", run, self.connection)["runs"][0]["status"])

    def log_of(self, run: str) -> str:
        """Return the log of a run."""
        return self._call(["log", run, self.connection, "--show"])[1]

    def stop_run(self, run: str) -> None:
        """Stop a run; also when this process has been asked to stop."""
        self._unstopped(30.0).json("stop", run, self.connection)

    # Calls.

    def json(self, *arguments: str) -> dict[str, Any]:
        """Return what a command prints as JSON; raise if it failed. Flower ends with 0 even then."""
        what = f"flwr {' '.join(arguments[:2])}"
        code, text = self._call([*arguments, "--format", "json"])
        try:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except (ValueError, RecursionError):
            raise FlowerCliError(f"{what} ended with code {code}: {_shorten(text)}") from None
        if not found.get("success"):
            message = str(found.get("error-message", ""))
            known = _CODE.search(message)
            raise FlowerCliError(
                f"{what}: {known[2] if known else _shorten(message)}", int(known[1]) if known else None
            )
        return dict(found)

    def _unstopped(self, timeout: float) -> FlowerCli:
        return FlowerCli(self.connection, environment=self.environment, timeout=timeout)

    def _call(self, arguments: list[str]) -> tuple[int, str]:
        """Run a command to its end; it has ended when this returns or raises."""
        end = time.monotonic() + self.timeout
        with tempfile.TemporaryFile() as out:
            handle = subprocess.Popen(
                [*end_with_parent(), program("flwr"), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the call
            )
            try:
                while (code := handle.poll()) is None:
                    if self.stop.wanted:
                        raise KeyboardInterrupt
                    if time.monotonic() > end:
                        raise FlowerCliError(f"flwr {' '.join(arguments[:2])} did not end in {self.timeout:.0f} s")
                    time.sleep(0.05)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(handle.pid, signal.SIGKILL)
                handle.wait()
            out.seek(0)
            return code, plain_text(out.read())


def _shorten(text: str) -> str:
    return " ".join(text.split())[-300:] or "it printed nothing"
