"""What sharing a round costs: rounds with almost no local work, in one process and on two ranks, one thread each.

Clients make two steps on quadratics of LeNet5's size; every round ends as in a run, with the digest of the model that
ranks compare. The overhead of two ranks is their time less half of that of ``loop``. Lower quartiles over rounds, so
that other work on the machine matters less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.engines.base import Engine
from feddpc.engines.distributed import Distributed
from feddpc.engines.loop import Loop
from feddpc.launch import launch
from feddpc.ranks import ALONE, Ranks, join, place
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs.keeper import Keeper
from scale_laws import Size


def times(engine: Engine, ranks: Ranks, size: Size, rounds: int) -> list[float]:
    """Return the seconds of some rounds."""
    experiment, method = size.experiment(), methods.create(size.method)
    state = RunState.of(experiment, method)
    keeper = Keeper(None, None, state, 1e9, False, ranks)

    def one() -> None:
        run_round(experiment, method, engine, state)
        keeper.agree(None)

    return [timed(one)[0] for _ in range(rounds + 3)][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, default=62_006)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    args = parser.parse_args()
    if place() is None:
        sys.exit(launch(2, [sys.executable, *sys.argv]))
    torch.set_num_threads(1)
    ranks, size = join("cpu", 600.0), Size(population=100, cohort=args.cohort, d=args.d)
    found = {}
    for way in ("loop", "1 rank", "2 ranks"):
        ranks.numbers([0])  # rank 0 measures what one process does, while rank 1 waits
        if way == "2 ranks":
            seconds = times(Distributed(Loop(), ranks), ranks, size, args.rounds)
        elif not ranks.rank:
            seconds = times(Loop() if way == "loop" else Distributed(Loop(), ALONE), ALONE, size, args.rounds)
        if not ranks.rank:
            found[way] = statistics.quantiles(seconds, n=4)[0]
    if ranks.rank:
        return
    found["overhead of 1 rank"] = found["1 rank"] - found["loop"]
    found["overhead of 2 ranks"] = found["2 ranks"] - found["loop"] / 2
    for what, seconds in found.items():
        print(f"{what}: {1e3 * seconds:.2f} ms")
    if args.out:
        args.out.write_text(json.dumps({"d": args.d, "cohort": args.cohort, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
