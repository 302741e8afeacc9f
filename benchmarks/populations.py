"""A million clients: time and memory of rounds with a cohort of 10,000, and a million client memories on disk.

The first part is one command, ``feddpc run --data benchmarks/populations.py:load --clients 1000000 --cohort 10000``,
on one process and on two ranks; memory is the largest of any process, data included. The second part lets every client
of a SCAFFOLD run on quadratics take part once, then measures rounds in which all of them are known.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from feddpc.data import Dataset
from feddpc.round.placement import Placement

FEATURES, CLASSES, TEST = 16, 4, 1000
#: How many samples `load` makes: one per client.
POPULATION = int(os.environ.get("POPULATION", "1000000"))


def load() -> Dataset:
    """Return one sample per client whose class depends on all features."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(POPULATION + TEST, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(1)
    return Dataset.from_arrays(x[:-TEST], y[:-TEST], x[-TEST:], y[-TEST:], classes=CLASSES)


def rounds(population: int, cohort: int, ranks: int, count: int) -> dict:
    """Run the command; return its median time per round and the largest peak of memory of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data", f"{__file__}:load", "--model", "mlp", "--method", "feddpc", "--partition", "iid"]
        words += ["--clients", str(population), "--cohort", str(cohort), "--rounds", str(count), "--quiet"]
        words += ["--batch-size", "1", "--out", f"{folder}/run", *(["--ranks", str(ranks)] if ranks > 1 else [])]
        command = [sys.executable, "-m", "feddpc", "run", *words]
        subprocess.run(command, check=True, env=os.environ | {"POPULATION": str(population)})
        lines = Path(folder, "run", "rounds.jsonl").read_text().splitlines()
    seconds = [json.loads(text)["seconds"] for text in lines]
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "part": "rounds",
        "ranks": ranks,
        "first": seconds[0],
        "seconds": statistics.median(seconds[1:]),
        "bytes": peak,
    }


def memories(population: int, cohort: int, d: int) -> dict:
    """Let all clients take part once, then measure rounds."""
    from scale_laws import Size, measure  # not on the path of the command above

    size = Size(population=population, cohort=cohort, d=d, method="scaffold", engine="stacked")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(size, 3, population // cohort, Placement("disk", Path(folder)))
        found["file"] = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
    return {"part": "memories", "d": d, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--population", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=10_000)
    parser.add_argument("--d", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=["rounds", "memories"])
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    args = parser.parse_args()
    rows = []
    print(f"{args.population:,} clients, {args.cohort:,} per round")
    for ranks in (1, 2) if "rounds" in args.parts else ():
        rows.append(found := rounds(args.population, args.cohort, ranks, args.rounds))
        text = f"{found['seconds']:.2f} s per round (the first {found['first']:.2f} s), {found['bytes'] / 1e9:.2f} GB"
        print(f"FedDPC on {ranks} ranks: {text} per process", flush=True)
    if "memories" in args.parts:
        rows.append(found := memories(args.population, args.cohort, args.d))
        text = f"{found['seconds']:.2f} s per round, {found['bytes'] / 1e9:.2f} GB, file {found['file'] / 1e9:.2f} GB"
        print(f"SCAFFOLD, {args.d:,} parameters, all clients known: {text}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
