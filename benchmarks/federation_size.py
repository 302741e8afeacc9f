"""What a federation needs: bytes per round and node on the wire, memory and CPU of every kind of process.

    python benchmarks/federation_size.py [--hidden 64 3300] [--nodes 2] [--rounds 3]

Trains the app of `feddpc federate init` with hidden layers of these widths over TLS on loopback (64: d = 8,970; 3300:
d = 11.1 million). Nodes reach the SuperLink through a relay in this process that counts bytes. Every 50 ms it looks at
each process: its largest resident memory, and the CPU seconds since it started.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from feddpc.federate import app_template, connections
from feddpc.federate.deployment import Deployment
from feddpc.federate.processes import marked
from feddpc.runs.record import read_records

PROGRAMS = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flower-superexec", "flwr-clientapp")
TICKS = os.sysconf("SC_CLK_TCK")


class Relay:
    """Passes connections on to another port of this machine and counts the bytes of both directions."""

    def __init__(self, to: int) -> None:
        self.to, self.up, self.down = to, 0, 0
        self.server = socket.create_server((connections.HOST, 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                node, _ = self.server.accept()
                link = socket.create_connection((connections.HOST, self.to))
                for source, target, way in ((node, link, "up"), (link, node, "down")):
                    threading.Thread(target=self._pump, args=(source, target, way), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                setattr(self, way, getattr(self, way) + len(data))
            target.shutdown(socket.SHUT_WR)


class Watch:
    """The largest memory and the CPU seconds of every process of a federation, by program."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.memory: dict[str, dict[int, float]] = defaultdict(dict)
        self.cpu: dict[str, dict[int, float]] = defaultdict(dict)

    def look(self) -> None:
        for pid in marked(self.mark):
            with suppress(OSError, IndexError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                name = next((p for p in PROGRAMS if any(part.endswith(f"/{p}".encode()) for part in command)), None)
                peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if name and peak:
                    self.memory[name][pid] = int(peak[1]) / 1000
                    self.cpu[name][pid] = (int(times[11]) + int(times[12])) / TICKS


def measure(hidden: int, nodes: int, rounds: int, folder: Path) -> None:
    """Train one model and print what it took."""
    app = folder / "app"
    app_template.write(app)
    task = app / "federation" / "task.py"
    layers = (
        f"nn.Linear(64, {hidden}), nn.ReLU(), nn.Linear({hidden}, {hidden}), nn.ReLU(), nn.Linear({hidden}, CLASSES)"
    )
    text = re.sub(r"nn\.Sequential\(.*\)", f"nn.Sequential(nn.Flatten(), {layers})", task.read_text())
    task.write_text(text)
    d = 64 * hidden + hidden + hidden * hidden + hidden + 10 * hidden + 10
    run, begin = folder / "run", {"up": 0, "down": 0}
    with Deployment(folder / "federation", nodes, tls=True) as deployment:
        deployment.start_superlink()
        deployment.register(range(nodes))
        relay, watch = Relay(deployment.port), Watch(deployment.processes.mark)
        deployment.port = relay.port  # for the nodes
        for number in range(nodes):
            deployment.start_node(number)
        config = {"clients": nodes, "cohort": nodes, "rounds": rounds, "epochs": 1, "folder": str(run)}
        first = None
        for _ in deployment.submit(app, config).wait(0.05):
            watch.look()
            if first is None and len(read_records(run / "rounds.jsonl")) == 1:
                first, begin = time.monotonic(), {"up": relay.up, "down": relay.down}
            last, end = time.monotonic(), {"up": relay.up, "down": relay.down}
    assert first is not None
    share = nodes * (rounds - 1)
    print(f"d = {d:,} ({4 * d / 1e6:.2f} MB), {nodes} nodes, {(last - first) / (rounds - 1):.1f} s per round")
    for way, word in (("down", "to a node"), ("up", "from a node")):
        print(f"  {word}: {(end[way] - begin[way]) / share / 1e6:.3f} MB per round")
    for name in PROGRAMS:
        peaks, seconds = watch.memory[name].values(), watch.cpu[name].values()
        print(
            f"  {name}: {max(peaks):.0f} MB, {sum(seconds) / len(seconds):.1f} s of CPU per process, "
            f"{len(peaks)} processes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 3300])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for hidden in given.hidden:
        folder = Path(tempfile.mkdtemp(prefix="federation-size-"))
        try:
            measure(hidden, given.nodes, given.rounds, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
