"""A federation on this machine: SuperLink, SuperNodes and runs as processes, with all their files in one folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from feddpc.config import write_toml
from feddpc.federate import connections
from feddpc.federate import keys as keyring
from feddpc.federate.processes import Process, ProcessGroup, environment, program
from feddpc.runs.stop import Stop
from feddpc.storage import explain_os_errors

#: Seconds that a process may take to start on a busy machine.
START_TIMEOUT = 120.0
#: The name of the SuperLink in the configuration of Flower's command line.
CONNECTION = "here"

Config = Mapping[str, str | int | float | bool]


class Deployment:
    """A SuperLink and its SuperNodes on loopback, to be used in a ``with`` block; after it no process is left.

    Args:
        folder: where keys, logs and working folders go.
        nodes: how many SuperNodes there are.
        tls: whether connections are encrypted and nodes need a key that the server knows.
        port: the SuperLink's port; by default a free one.
        stop: a request to stop, which is checked while waiting.
    """

    def __init__(
        self, folder: Path, nodes: int, *, tls: bool, port: int | None = None, stop: Stop | None = None
    ) -> None:
        if port is not None:
            connections.check_free(port)
        self.folder, self.nodes, self.tls = folder.resolve(), nodes, tls
        self.port, *self._node_ports = connections.free_ports(nodes + 1)
        self.port = port or self.port
        self.keys = keyring.Keys(self.folder / "keys")
        self.stop = stop or Stop()
        self.processes = ProcessGroup(str(self.folder), self.folder / "logs")
        self.superlink: Process | None = None
        self.supernodes: dict[int, Process] = {}

    def __enter__(self) -> Deployment:
        if self.tls:
            keyring.make(self.keys.folder, keyring.LOOPBACK, self.nodes)
        self.processes.__enter__()
        with explain_os_errors(self.folder):
            (self.folder / "server").mkdir(parents=True, exist_ok=True)
            for path in self._database.parent.glob(f"{self._database.name}*"):
                path.unlink()  # an earlier federation's nodes are not valid any more
        self._write_connection()
        return self

    def __exit__(self, *exc: object) -> None:
        self.processes.stop()

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"{connections.HOST}:{self.port}"

    # The processes.

    def start(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Start the SuperLink, register the nodes' keys, and start the nodes; ``tell`` shows each step."""
        if self.tls:
            tell(f"keys and certificates: {self.keys.folder}")
        self.start_superlink()
        how = "TLS, only nodes with a registered key" if self.tls else "neither encrypted nor authenticated"
        tell(f"SuperLink: {self.address}, {how}")
        if self.tls:
            self.register(range(self.nodes))
        for number in range(self.nodes):
            self.start_node(number)
        tell(f"SuperNodes: {self.nodes}, logs of all processes in {self.processes.logs}")

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        command = [program("flower-superlink"), "--host", connections.HOST, "--port", str(self.port)]
        command += ["--database", str(self._database)]
        if self.tls:
            files = {"ca-certfile": self.keys.ca, "certfile": self.keys.server, "keyfile": self.keys.server_key}
            command += [part for name, path in files.items() for part in (f"--ssl-{name}", str(path))]
            command.append("--enable-supernode-auth")
        else:
            command.append("--insecure")
        process = self.superlink = self._start("SuperLink", command, "server")
        end = time.monotonic() + START_TIMEOUT
        while not connections.is_listening(self.port):
            if process.ended:
                raise process.failure()
            if time.monotonic() > end:
                raise process.failure("does not answer")
            self.pause(0.1)

    def start_node(self, number: int, *, key: Path | None = None, ca: Path | None = None) -> Process:
        """Start a SuperNode with a key and the authority that it trusts, by default those in the folder of keys."""
        node_config = f"partition-id={number} num-partitions={self.nodes}"
        command = [program("flower-supernode"), "--superlink", self.address, "--node-config", node_config]
        command += ["--host", connections.HOST, "--port", str(self._node_ports[number])]
        if self.tls:
            command += ["--root-certificates", str(ca or self.keys.ca)]
            command += ["--auth-supernode-private-key", str(key or self.keys.node(number))]
        else:
            command.append("--insecure")
        self.supernodes[number] = self._start(f"SuperNode {number}", command, f"node-{number}")
        return self.supernodes[number]

    def register(self, numbers: range) -> None:
        """Register the public keys of nodes at the SuperLink."""
        flwr, calls = program("flwr"), []
        for number in numbers:
            command = [flwr, "supernode", "register", f"{self.keys.node(number)}.pub", CONNECTION]
            calls.append(self._start(f"registration {number}", command, "server"))
        for call in calls:
            if self._exit_code(call):
                raise call.failure()

    # Runs.

    def submit(self, app: Path, config: Config) -> AppRun:
        """Run an app on the federation; ``config`` overrides the app's own configuration."""
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = [program("flwr"), "run", str(app.resolve()), CONNECTION, "--stream", "-c", overrides]
        stream = self._start("run", command, "server")
        return AppRun(self, stream)

    def check(self) -> None:
        """Raise if a process that should run has ended."""
        for process in (self.superlink, *self.supernodes.values()):
            if process is not None and process.ended:
                raise process.failure()

    def pause(self, seconds: float) -> None:
        """Wait; raise KeyboardInterrupt if a stop is requested."""
        if self.stop.wanted:
            raise KeyboardInterrupt
        time.sleep(seconds)

    def state_of(self, run: str) -> str:
        """Return the status of a run as Flower names it."""
        command = [program("flwr"), "list", "--run-id", run, CONNECTION, "--format", "json"]
        call = self._start("status", command, "server")
        self._exit_code(call)
        text = call.text()
        try:
            return str(json.loads(text[text.index("{") :])["runs"][0]["status"])
        except (ValueError, LookupError):
            raise call.failure("gave no status") from None

    # Helpers.

    @property
    def _database(self) -> Path:
        return self.folder / "server" / "superlink.db"

    def _start(self, name: str, command: list[str], place: str) -> Process:
        where = self.folder / place
        with explain_os_errors(where):
            where.mkdir(exist_ok=True)
        return self.processes.start(name, command, where, environment(where / "flwr"))

    def _write_connection(self) -> None:
        how: dict[str, Any] = {"address": self.address}
        how |= {"root-certificates": str(self.keys.ca)} if self.tls else {"insecure": True}
        path = self.folder / "server" / "flwr" / "config.toml"
        with explain_os_errors(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text(write_toml({"superlink": {"default": CONNECTION}, f"superlink.{CONNECTION}": how}))

    def _exit_code(self, process: Process) -> int:
        """Wait for a process to end, and return its exit code."""
        while (code := process.handle.poll()) is None:
            self.pause(0.05)
        return code


class AppRun:
    """A run of an app, followed by its log stream."""

    def __init__(self, deployment: Deployment, stream: Process) -> None:
        self.deployment, self.stream = deployment, stream

    @property
    def number(self) -> str | None:
        """The run's id, once the SuperLink has accepted it."""
        started = re.findall(r"Successfully started run (\d+)", self.stream.text())
        return started[-1] if started else None

    def wait(self, seconds: float = 0.2) -> Iterator[None]:
        """Yield every ``seconds`` until the run has ended; raise if the run or a process that it needs failed."""
        while not self.stream.ended:
            yield
            self.deployment.check()
            self.deployment.pause(seconds)
        if self.number is None:
            raise self.stream.failure("was not accepted")
        state = self.deployment.state_of(self.number)
        if state != "finished:completed":
            raise self.stream.failure(f"{self.number} is {state}")
        yield
