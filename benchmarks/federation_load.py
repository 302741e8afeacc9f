"""Load and faults on a real SuperLink: many thin nodes that come, go, hang, lie and restart; kill -9 of every part.

    python benchmarks/federation_load.py faults [--nodes 50 --cohort 20 --rounds 30 --deadline 60]
    python benchmarks/federation_load.py kills [--nodes 12 --rounds 12 --kills 10 --method scaffold]

SuperLink, server app and nodes are processes of their own on loopback; nodes share a few processes (`thin_nodes.py`).
`kills` ends one part after the other with SIGKILL, at a random moment after the federation has finished another round,
starts it again at once, and submits the app again when its run has failed. Both then replay the run in this process,
with exactly those replies that the records say counted: the final model must be the same bit by bit. Prints JSON; the
exit code is 1 if a round was lost, the models differ, or memory grew by more than a tenth from the middle of the run to
its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

from feddpc.federate import app_template
from feddpc.federate.deployment import AppRun, Deployment
from feddpc.federate.processes import Process, environment, marked
from feddpc.runs.checkpoint import load_model
from feddpc.runs.record import read_records

PARTS = ("server app", "SuperLink", "nodes")
HERE = Path(__file__).parent


class Federation:
    """A SuperLink, processes of thin nodes and one run, which is submitted again until it is finished."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given = folder, given
        self.app, self.run = folder / "app", folder / "run"
        app_template.write(self.app)
        self.config: dict[str, Any] = {
            "clients": given.nodes,
            "cohort": given.cohort,
            "rounds": given.rounds,
            "method": given.method,
            "epochs": 1,
            "deadline": given.deadline,
            "max-norm": 1000.0,
            "folder": str(self.run),
        }
        # Configuration on the command line can only change keys that the app has.
        path = self.app / "pyproject.toml"
        path.write_text(path.read_text() + f"deadline = {given.deadline}\nmax-norm = 1000.0\n")
        self.deployment = Deployment(folder / "federation", 0, tls=False)
        self.nodes: list[Process] = []
        self.stream: AppRun | None = None
        self.submitted = 0
        self.memory: list[dict[str, float]] = []

    def start_nodes(self, which: int) -> None:
        """Start one of the processes of nodes."""
        given, mine = self.given, range(which, self.given.nodes, self.given.processes)
        shares = {"hang": 0.01, "lie": 0.04, "crash": 0.01, "leave": 0.02} if given.kind == "faults" else {}
        command = [sys.executable, str(HERE / "thin_nodes.py"), "--server", self.deployment.address]
        command += ["--app", str(self.app), "--nodes", ",".join(map(str, mine)), "--of", str(given.nodes)]
        command += ["--folder", str(self.folder / f"memory-{which}"), "--deadline", str(given.deadline)]
        command += [f"--{kind}={share}" for kind, share in shares.items()]
        env = environment(self.folder / f"flwr-{which}")
        process = self.deployment.processes.start(f"nodes {which}", command, self.folder, env)
        self.nodes[which : which + 1] = [process]

    def records(self) -> list[dict[str, Any]]:
        return read_records(self.run / "rounds.jsonl")

    def finished(self) -> bool:
        path = self.run / "summary.json"
        return path.exists() and json.loads(path.read_text()).get("status") == "finished"

    def keep_running(self) -> None:
        """Submit the app if no run of it is going on."""
        if self.stream is None or self.stream.stream.ended:
            for pid in pids_of(self.deployment, "flwr-serverapp"):  # of a SuperLink that is gone
                os.kill(pid, signal.SIGKILL)
            self.stream = self.deployment.submit(self.app, self.config)
            self.submitted += 1

    def kill(self, part: str, rng: random.Random) -> bool:
        """Kill a part and start it again (`keep_running` submits the server app); say whether it ran."""
        if part == "server app":
            running = pids_of(self.deployment, "flwr-serverapp")
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return bool(running)
        if part == "SuperLink":
            assert self.deployment.superlink is not None
            self.deployment.superlink.kill()
            self.deployment.start_superlink()
        else:
            which = rng.randrange(len(self.nodes))
            self.nodes[which].kill()
            self.start_nodes(which)
        return True

    def look(self) -> None:
        """Note how much memory the parts have."""
        link = self.deployment.superlink
        ids = {"SuperLink": [link.handle.pid] if link else [], "server app": pids_of(self.deployment, "flwr-serverapp")}
        ids["nodes"] = [process.handle.pid for process in self.nodes]
        self.memory.append({name: sum(map(resident, found)) for name, found in ids.items() if found})


def pids_of(deployment: Deployment, program: str) -> list[int]:
    """Return the processes of a federation that run a program of Flower's."""
    found = []
    for pid in marked(deployment.processes.mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(part.endswith(f"/{program}".encode()) for part in command):
            found.append(pid)
    return found


def resident(pid: int) -> float:
    """Return the MB of memory that a process has."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1000 if found else 0.0


def replay(federation: Federation, counted: dict[int, set[int]]) -> bool:
    """Run the app in this process with the replies that counted; return whether the final models are the same."""
    script = f"""
import sys
sys.path.insert(0, {str(federation.app)!r})
from flwr.app import Context, RecordDict
from feddpc.flower import InProcessGrid
from federation import client_app, server_app
counted = {counted!r}
class Replay(InProcessGrid):
    def deliver(self, message):
        about = message.metadata
        if about.message_type == "train" and about.dst_node_id - 1000 not in counted[int(about.group_id)]:
            return []
        return super().deliver(message)
config = {dict(settings(federation.app) | federation.config | {"folder": str(federation.folder / "replay")})!r}
grid = Replay(client_app.app, config["clients"], run_config=config)
server_app.app(grid, Context(1, 1, {{}}, RecordDict(), config))
"""
    place = federation.folder / "replay-memory"
    place.mkdir()
    env = environment(place)
    log = federation.folder / "replay.log"
    with log.open("w") as out:
        subprocess.run([sys.executable, "-c", script], cwd=place, env=env, check=True, stdout=out, stderr=out)
    theirs, ours = (load_model(federation.folder / name / "model.safetensors") for name in ("run", "replay"))
    return theirs.keys() == ours.keys() and all(torch.equal(value, ours[name]) for name, value in theirs.items())


def settings(app: Path) -> dict[str, Any]:
    """Return the configuration of an app."""
    config: dict[str, Any] = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return config


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run a federation to its end, or to the end of the time; return what happened."""
    rng = random.Random(given.seed)
    federation, kills, begin = Federation(folder, given), [], time.monotonic()
    with federation.deployment:
        federation.deployment.start_superlink()
        for which in range(given.processes):
            federation.start_nodes(which)
        next_kill, next_look = None, begin
        while not federation.finished():
            now = time.monotonic()
            if now - begin > given.minutes * 60:
                break
            federation.keep_running()
            if now >= next_look:
                federation.look()
                next_look = now + 5.0
            done = len(federation.records())
            recovered = done > (
                kills[-1]["after round"] if kills else 0
            )  # so that every kill hits a running federation
            if given.kind == "kills" and len(kills) < given.kills and recovered:
                next_kill = next_kill or now + rng.uniform(1.0, given.every)
                if now >= next_kill:
                    part = PARTS[len(kills) % len(PARTS)]
                    if federation.kill(part, rng):
                        kills.append({"part": part, "after round": done, "at": round(now - begin, 1)})
                        print(json.dumps(kills[-1]), flush=True)
                        next_kill = None
            time.sleep(0.2)
        took = time.monotonic() - begin
    records = federation.records()
    same = replay(federation, {r["round"]: set(r["participants"]) for r in records}) if federation.finished() else None
    return summary(federation, records, took) | {"kills": kills, "replay equal bit by bit": same}


def summary(federation: Federation, records: list[dict[str, Any]], took: float) -> dict[str, Any]:
    """Return the figures of a run."""
    given, refusals = federation.given, federation.run / "refused.jsonl"
    reasons: dict[str, int] = {}
    for line in refusals.read_text().splitlines() if refusals.exists() else ():
        reason = re.sub(r"\d[\d.e+-]*", "N", json.loads(line)["reason"])[:60]
        reasons[reason] = reasons.get(reason, 0) + 1
    half, last = (federation.memory[len(federation.memory) * k // 10 :][:20] for k in (4, 9))
    parts = {name for sample in half + last for name in sample}
    means = {
        name: [round(statistics.mean(s[name] for s in some if name in s)) for some in (half, last)]
        for name in parts
        if all(any(name in s for s in some) for some in (half, last))
    }
    return {
        "nodes": given.nodes,
        "rounds": len(records),
        "void rounds": sum(not record["participants"] for record in records),
        "seconds": round(took),
        "replies": sum(len(record["participants"]) for record in records),
        "refused": reasons,
        "missing": sum(len(record["dropped"]) for record in records),
        "submitted": federation.submitted,
        "MB in the middle and at the end": means,
        "accuracy": records[-1]["test_accuracy"] if records else None,
        "load average": os.getloadavg()[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("faults", "kills"))
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--cohort", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--processes", type=int, default=4, help="how many processes the nodes share")
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=60.0, help="at most so many seconds between two kills")
    parser.add_argument("--method", default="feddpc")
    parser.add_argument("--minutes", type=float, default=60.0, help="then it ends, finished or not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = {"faults": (50, 20, 30), "kills": (12, 6, 12)}[given.kind]
    for name, value in zip(("nodes", "cohort", "rounds"), usual, strict=True):
        setattr(given, name, getattr(given, name) or value)
    folder = given.out or Path(tempfile.mkdtemp(prefix="federation-load-"))
    try:
        result = measure(folder, given)
    finally:
        if given.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))
    flat = all(last <= 1.1 * half for half, last in result["MB in the middle and at the end"].values())
    fine = result["rounds"] == given.rounds and not result["void rounds"] and result["replay equal bit by bit"]
    return 0 if fine and (flat or given.kind == "kills") else 1


if __name__ == "__main__":
    sys.exit(main())
