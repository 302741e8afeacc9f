"""What it costs to read and write the states of a cohort, on the device and on disk, and how much memory that takes.

Every client of the population is seen first, twice and with a checkpoint each time, so that table and file are as
large as they get ("first" is the median over the second time). The other times are medians over cohorts drawn at
random. "checkpoint" is bringing what these wrote to the disk; other tables are copied into the checkpoint instead,
which is not timed here. Each way runs in a process of its own, for the sake of the peak.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from feddpc.round.client_table import ClientTable
from feddpc.round.placement import Kind, Placement


def measure(kind: Kind, d: int, clients: int, cohort: int, repeats: int, folder: Path) -> None:
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = ClientTable(lambda: {"c": torch.zeros(d)}, "memory", clients, Placement(kind, folder))
    rng, firsts, reads, writes = np.random.default_rng(0), [], [], []
    for turn in range(2):
        for first in range(0, clients, cohort):
            ids = np.arange(first, min(first + cohort, clients))
            state = {"c": torch.full((len(ids), d), float(turn))}
            began = time.perf_counter()
            memory.write(ids, state)
            firsts.append(time.perf_counter() - began)
        memory.export()
        memory.committed()
    for _ in range(repeats):
        ids = rng.choice(clients, cohort, replace=False)
        began = time.perf_counter()
        state = memory.read(ids)
        reads.append(time.perf_counter() - began)
        state["c"] += 1
        began = time.perf_counter()
        memory.write(ids, state)
        writes.append(time.perf_counter() - began)
    began = time.perf_counter()
    if kind == "disk":
        memory.export()
    synced = f"{time.perf_counter() - began:12.3f}" if kind == "disk" else f"{'-':>12}"
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1e6
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    first, read, write = (statistics.median(times) for times in (firsts[len(firsts) // 2 :], reads, writes))
    print(f"{d:12,} {kind:8}{first:10.4f}{read:10.4f}{write:10.4f}{read + write:10.4f}{synced}{peak:10.2f}{size:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[62_006, 11_227_812])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["device", "host", "disk"])
    parser.add_argument("--folder", type=Path, help="where the file goes [default: a temporary folder]")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(args.kinds[0], args.parameters[0], args.clients, args.cohort, args.repeats, Path(folder))
        return
    print(f"{args.clients} clients, {args.cohort} a round, float32, torch {torch.__version__}; seconds and GB")
    heads = "".join(f"{name:>10}" for name in ("first", "read", "write", "both"))
    print(f"{'parameters':>12} {'where':8}{heads}{'checkpoint':>12}{'peak':>10}{'file':>8}")
    for d in args.parameters:
        for kind in args.kinds:
            own = ["--here", "--kinds", kind, "--parameters", str(d)]
            subprocess.run([sys.executable, *sys.argv, *own], check=True)


if __name__ == "__main__":
    main()
