"""The same rounds in feddpc, a plain eager loop, Flower's simulation and pfl, one system after the other, in turns.

    python benchmarks/peers/run.py --flower ENV/bin/python --pfl ENV/bin/python --turns 3

CIFAR-10's shapes (random bytes), LeNet5, 10 of 100 clients, alpha 0.6, batch 256, one epoch, FedAvg with equal weights,
evaluation of 10,000 images per round. All systems get the partition that feddpc made. Each environment needs what the
requirements file beside its driver says. A system that fails is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from feddpc.bench import machine
from feddpc.bench.workloads import WORKLOADS
from feddpc.build import build

HERE = Path(__file__).parent
LIMIT = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, help="python of an environment with flwr")
    parser.add_argument("--pfl", type=Path, help="python of an environment with pfl")
    parser.add_argument("--rounds", type=int, default=10, help="a turn, after two that warm up")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--engines", default="auto", help="feddpc's, with commas between them")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    args = parser.parse_args()
    systems = {"plain eager loop": [sys.executable, "feddpc_driver.py", "--way", "eager"]}
    for engine in args.engines.split(","):
        systems[f"feddpc, {engine}"] = [sys.executable, "feddpc_driver.py", "--way", engine]
    if args.pfl:
        systems["pfl"] = [args.pfl.absolute(), "pfl_driver.py"]
    if args.flower:
        systems["Flower"] = [args.flower.absolute(), "flower_driver.py"]
    found: dict[str, list[dict]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work.npz")
        _make(work)
        for turn in range(args.turns):
            for name, command in systems.items():
                print(f"turn {turn + 1}: {name}", file=sys.stderr)
                found[name].append(_run(command, work, Path(folder, "seconds.json"), args.rounds))
    facts = machine.describe("cpu")
    print(
        f"{facts['cores']} cores, load {facts['load']:.1f} at the end, torch {facts['torch']}, {facts['date']}; "
        f"{args.turns} turns of {args.rounds} rounds"
    )
    # A neighbour that comes and goes can spoil a turn of one system: the best turns are compared beside the medians.
    print(f"{'system':28}{'s per round':>10}{'by turn':>24}{'against eager':>15}{'best turns':>12}")
    base: tuple[float, float] | None = None
    for name, turns in found.items():
        good = [t for t in turns if "seconds" in t]
        if not good:
            print(f"{name:28}cannot run: {turns[-1]['error']}")
            continue
        median = statistics.median(s for t in good for s in t["seconds"])
        by_turn = [statistics.median(t["seconds"]) for t in good]
        base = base or (median, min(by_turn))
        shown = ", ".join(f"{s:.2f}" for s in by_turn)
        ratios = f"{base[0] / median:15.2f}{base[1] / min(by_turn):12.2f}"
        print(f"{good[-1]['system']:28}{median:10.3f}{shown:>24}{ratios}")
    if args.out:
        args.out.write_text(json.dumps({"machine": facts, "systems": found}, indent=1) + "\n")


def _make(path: Path) -> None:
    """Write images, labels and the partition."""
    workload = WORKLOADS["cifar10"]
    data = workload.data()
    partition = build(workload.config(device="cpu"), data=data).partition
    arrays = {k: getattr(data, k) for k in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(path, **arrays, order=partition.order, starts=partition.starts)


def _run(command: list, work: Path, out: Path, rounds: int) -> dict:
    """Run one driver in its environment; return its figures and the load before, or why there are none."""
    program, script, *rest = command
    load = os.getloadavg()[0]
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [str(program), str(HERE / script), str(work), str(out), "--rounds", str(rounds), *rest],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=work.parent,  # Flower's processes import from where they were started
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error), "load": load}
    if done.returncode or not out.exists():
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": lines[-1], "load": load}
    return json.loads(out.read_text()) | {"load": load}


if __name__ == "__main__":
    main()
