"""Where the seconds of a round of `feddpc federate demo` go, beside a stock FedAvg app of the same model and data.

    python benchmarks/federation_round.py [--nodes 4] [--rounds 5] [--repeats 2] [--out FOLDER]
    python benchmarks/federation_round.py --inside

The first starts a SuperLink and SuperNodes on loopback with TLS, submits both apps in turn, and stamps every line of
the logs as it appears. A round's parts, as a node sees them: until it looks for a message (Flower: every 3 s), until
its process for that message has started, until the process has answered, until the answer is sent, and until the server
goes on. The second needs no federation: it starts fresh processes as a node does, and prints the CPU seconds of Flower,
torch, feddpc and the app in each, so that what else runs on the machine matters little.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from feddpc.federate import app_template
from feddpc.federate.deployment import Deployment
from feddpc.federate.processes import environment

#: Flower's FedAvg and a client in plain torch, as Flower's own examples have them.
STOCK = {
    "server_app": """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from federation import task

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    share = config["cohort"] / config["clients"]
    strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=config["clients"])
    test = task.test()

    def evaluate(t, arrays):
        import torch
        from flwr.app import MetricRecord
        model = task.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            right = model(torch.as_tensor(test[0]).float() / 16).argmax(1) == torch.as_tensor(test[1])
        return MetricRecord({"accuracy": float(right.float().mean())})

    arrays = ArrayRecord(task.model().state_dict())
    strategy.start(grid, arrays, num_rounds=config["rounds"], evaluate_fn=evaluate)
""",
    "client_app": """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from federation import task

app = ClientApp()

@app.train()
def train(message, context):
    about, config = context.node_config, context.run_config
    x, y = (torch.as_tensor(a) for a in task.data(about["partition-id"], about["num-partitions"]))
    x = x.float() / 16
    model = task.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["client-lr"])
    for _ in range(config["epochs"]):
        for batch in torch.randperm(len(y)).split(config["batch-size"]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
""",
}
APPS = ("feddpc", "stock")
#: The lines of a node's log that end its parts of a round.
MARKS = {
    "Receiving: train": "look",
    "Start `flwr-clientapp`": "start",
    "Sending: train": "answer",
    "Sent successfully": "send",
}
#: What a fresh process of a node does, one statement after the other; each is measured.
CLIENT = ["import flwr.supernode.cli, flwr.clientapp, flwr.app", "import torch", "import federation.client_app"]
#: And then one round of three in one process: the first round, as a fresh process does only one.
INSIDE = """
import itertools
import json, sys, time, tomllib
marks = [time.process_time()]
for line in {statements!r}:
    exec(line)
    marks.append(time.process_time())
from flwr.app import Context, RecordDict
from feddpc.flower import InProcessGrid
from federation import client_app
import federation.server_app as server_app
config = tomllib.load(open("pyproject.toml", "rb"))["tool"]["flwr"]["app"]["config"]
config |= dict(rounds=4, folder=sys.argv[1])
class Timed(InProcessGrid):
    seconds = []
    def deliver(self, message):
        begin = time.process_time()
        replies = super().deliver(message)
        about = message.metadata
        self.seconds.append((about.dst_node_id, about.message_type, time.process_time() - begin))
        return replies
grid = Timed(client_app.app, config["clients"], run_config=config)
begin = time.process_time()
server_app.app(grid, Context(1, 1, {{}}, RecordDict(), config))
total = time.process_time() - begin
# Greeted and asked to train, as in a new process.
first = next(node for node, kind, _ in grid.seconds if kind == "train")
answers = {{kind: cpu for node, kind, cpu in reversed(grid.seconds) if node == first}}
server = (total - sum(cpu for *_, cpu in grid.seconds)) / config["rounds"]
print(json.dumps([b - a for a, b in zip(marks, marks[1:])] + [sum(answers.values()), server]))
"""


def write_app(kind: str, folder: Path) -> Path:
    app_template.write(folder)
    for name, text in (STOCK if kind == "stock" else {}).items():
        (folder / "federation" / f"{name}.py").write_text(text.lstrip())
    return folder


class Stamps:
    """Reads growing logs and remembers when each line appeared."""

    def __init__(self, logs: list[Path]) -> None:
        self.lines: dict[Path, list[tuple[float, str]]] = {log: [] for log in logs}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        at = dict.fromkeys(self.lines, 0)
        while not self._ended.wait(0.02):
            for log, lines in self.lines.items():
                if not log.exists() or log.stat().st_size == at[log]:
                    continue
                text, now = log.read_bytes()[at[log] :], time.monotonic()
                whole = text[: text.rfind(b"\n") + 1]
                at[log] += len(whole)
                lines += [(now, line) for line in whole.decode(errors="replace").splitlines()]

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def deploy(nodes: int, rounds: int, repeats: int, folder: Path) -> None:
    """Print the seconds per round of both apps and the parts of a round."""
    apps = {kind: write_app(kind, folder / kind) for kind in APPS}
    seconds: dict[str, list[float]] = defaultdict(list)
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    with Deployment(folder / "federation", nodes, tls=True) as deployment:
        deployment.start(print)
        logs = folder / "federation" / "logs"
        stamps = Stamps([logs / "run.log", *(logs / f"SuperNode-{i}.log" for i in range(nodes))])
        for turn in range(repeats):
            for kind in APPS:
                config = {"clients": nodes, "rounds": rounds, "folder": str(folder / f"run-{kind}-{turn}")}
                begin = time.monotonic()
                for _ in deployment.submit(apps[kind], config).wait():
                    pass
                time.sleep(0.2)
                took, some = _read(stamps, begin)
                seconds[kind] += took
                for part, values in some.items():
                    parts[kind, part] += values
        stamps.stop()
    for kind in APPS:
        print(f"{kind}: {_middle(seconds[kind])} s per round, {len(seconds[kind])} rounds")
        for part in ("look", "start", "answer", "send"):
            print(f"  until {part}: {_middle(parts[kind, part])}")


def _read(stamps: Stamps, since: float) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds of the rounds after the first, and per part those of all messages."""
    run, *nodes = stamps.lines.values()
    begins = [at for at, line in run if at > since and re.search(r"\[ROUND \d+/", line)]
    parts: dict[str, list[float]] = defaultdict(list)
    for lines in nodes:
        last = None
        for at, line in lines:
            mark = next((m for m in MARKS if m in line), None)
            if at < since or mark is None or not begins:
                continue
            if MARKS[mark] == "look":
                last = max((b for b in begins if b <= at), default=None)
            if last is not None:
                parts[MARKS[mark]].append(at - last)
                last = at if MARKS[mark] != "send" else None
    return [b - a for a, b in itertools.pairwise(begins[1:])], parts


def _middle(values: list[float]) -> str:
    if len(values) < 2:
        return "too few"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def inside(folder: Path, repeats: int) -> None:
    """Print the CPU seconds of a client process, part by part, and of the server per round."""
    names = ["Python and Flower", "torch", "the app (feddpc)", "answering", "server, per round"]
    for kind in APPS:
        app = write_app(kind, folder / kind)
        rows = []
        for turn in range(repeats):
            command = [sys.executable, "-c", INSIDE.format(statements=CLIENT), str(folder / f"inside-{kind}-{turn}")]
            env = environment(folder) | {"PYTHONPATH": f"{app}:{environment(folder).get('PYTHONPATH', '')}"}
            done = subprocess.run(command, cwd=app, env=env, check=True, stdout=subprocess.PIPE, text=True)
            rows.append([float(part) for part in re.findall(r"[\d.e-]+", done.stdout.splitlines()[-1])])
        print(kind)
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            print(f"  {name:20} {min(values):.3f} s of CPU (median {statistics.median(values):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="federation-round-"))
    try:
        if given.inside:
            inside(folder, given.repeats)
        else:
            deploy(given.nodes, given.rounds, given.repeats, folder)
    finally:
        if given.out is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
