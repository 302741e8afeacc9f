"""How many copies of a large model each rank of a run holds at its peak, and the time of its rounds.

A perceptron on random images of CIFAR-10's shape; every client makes a few local steps. The peak is that of the
process's resident memory, beyond what is resident when the data are there and the network is not. Checkpoints are
written after every round unless ``--without-checkpoints`` is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.launch import launch
from feddpc.ranks import place
from feddpc.runs.runner import execute
from scale_laws import peak_memory

SHAPE, CLASSES, SAMPLES = (32, 32, 3), 10, 200


def network(parameters: int) -> nn.Module:
    """Return a perceptron with eight hidden layers and about so many parameters."""
    torch.manual_seed(0)  # the same one on every rank
    inputs, layers = int(np.prod(SHAPE)), 8
    width = round((-inputs + (inputs**2 + 4 * (layers - 1) * parameters) ** 0.5) / (2 * (layers - 1)))
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def images() -> Dataset:
    """Return a few random images."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8), rng.integers(0, CLASSES, SAMPLES)
    return Dataset.from_arrays(x, y, x[:20], y[:20], classes=CLASSES)


def measure(args: argparse.Namespace) -> dict:
    """Run as one of the ranks; return what this one found."""
    data, found = images(), {}

    def run() -> None:
        values = {"method": args.method, "clients": 2 * args.cohort, "cohort": args.cohort, "rounds": args.rounds}
        values |= {"batch_size": 5, "epochs": 1, "partition": "iid", "engine": "distributed", "inner_engine": "loop"}
        experiment = build(Config.read(values | {"device": "cpu"}), data=data, module=network(args.parameters))
        out = Path(args.folder) / "run" if args.folder else None
        outcome = execute(experiment, out=out, checkpoint_seconds=0, last_use=True)
        found.update(parameters=experiment.task.d, seconds=[r["seconds"] for r in outcome.records])

    peak = peak_memory(run)
    where = place()
    found |= {"rank": where.rank if where else 0, "bytes": peak, "copies": (peak or 0) / (4 * found["parameters"])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--method", default="feddpc")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--without-checkpoints", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--said", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.said:
        found = measure(args)
        (args.said / f"{found['rank']}.json").write_text(json.dumps(found))
        return
    rows = []
    print(f"{args.method}, cohort {args.cohort}, one local step per 5 samples; copies at the peak, per rank")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            own = ["--said", folder, *([] if args.without_checkpoints else ["--folder", folder])]
            if launch(size, [sys.executable, *sys.argv, *own]):
                sys.exit(f"{size} ranks failed")
            found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
        rows += [row | {"ranks": size} for row in found]
        seconds = statistics.median(found[0]["seconds"])
        copies = ", ".join(f"{row['copies']:.2f}" for row in found)
        print(
            f"{size} ranks: {found[0]['parameters']:,} parameters, {copies} copies, {seconds:.1f} s per round",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
