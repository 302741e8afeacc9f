"""Clients' memories on two ranks: what it costs to move one, and whole rounds that always, sometimes or never do it.

SCAFFOLD, LeNet5 on CIFAR-10's shapes. Clients are dealt by their local steps; a rank that does not have a client's
memory counts as MOVE steps busier. 0 moves whatever balances the work, a large number keeps every client at home, and 1
is what the engine uses. The three take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.bench.entrants import Workbench
from feddpc.bench.workloads import WORKLOADS
from feddpc.engines.distributed import Distributed, shares
from feddpc.engines.distributed.homes import Homes
from feddpc.engines.loop import Loop
from feddpc.launch import launch
from feddpc.ranks import Ranks, join, place
from feddpc.round.client_table import ClientTable
from feddpc.round.round import run_round
from feddpc.round.state import RunState

MOVES = (0.0, 1.0, 1e6)


def one_move(ranks: Ranks, d: int, count: int = 4) -> float:
    """Return the seconds that it takes to bring one memory of ``d`` numbers to the other rank; they travel back too."""
    table = ClientTable(lambda: {"c": torch.zeros(d)}, "memory", 2 * count)
    mine = np.arange(count) + count * ranks.rank
    table.write(mine, {"c": torch.ones(count, d)})
    ids, source = np.arange(2 * count), np.repeat([0, 1], count)

    def there_and_back() -> None:
        homes = Homes(ranks)
        homes._move_rows(table, ids, source, 1 - source)
        homes._move_rows(table, ids, 1 - source, source)
        ranks.numbers([0])

    there_and_back()
    return statistics.median(timed(there_and_back)[0] for _ in range(5)) / (2 * count)


def measure(turns: int) -> dict:
    """Measure as one of two ranks."""
    ranks, method = join("cpu", 600.0), methods.create("scaffold")
    bench = Workbench(WORKLOADS["cifar10"], "cpu")
    experiment = bench.experiment("float32")
    runs = {move: (Distributed(Loop(), ranks), RunState.of(experiment, method)) for move in MOVES}
    seconds: dict[float, list[float]] = {move: [] for move in MOVES}
    steps = []
    for turn in range(turns):
        for move, (engine, state) in runs.items():
            shares.MOVE = move
            ranks.numbers([0])
            began = experiment.task.work.gradients
            took = timed(lambda e=engine, s=state: (run_round(experiment, method, e, s), ranks.numbers([0])))[0]
            steps.append(took / max(1, experiment.task.work.gradients - began) * ranks.size)
            if turn:
                seconds[move].append(took)
    rows = [{"d": d, "seconds": one_move(ranks, d)} for d in (62_006, 1_000_000, 11_227_812)]
    medians = {str(move): statistics.median(times) for move, times in seconds.items()}
    return {"rounds": medians, "step": statistics.median(steps), "moves": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    args = parser.parse_args()
    where = place()
    if where is None:
        sys.exit(launch(2, [sys.executable, *sys.argv]))
    found = measure(args.turns)
    if where.rank:
        return
    print(f"a local step takes {1e3 * found['step']:.1f} ms, evaluation included")
    for row in found["moves"]:
        print(f"a memory of {row['d']:,} numbers moves in {1e3 * row['seconds']:.2f} ms")
    for move, seconds in found["rounds"].items():
        print(f"MOVE = {float(move):g}: {1e3 * seconds:.0f} ms per round")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
