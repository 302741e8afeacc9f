"""Two ranks on one GPU against one process: the records of several methods must agree to 1e-9 in float64.

NCCL refuses two ranks on one device, so gloo carries the tensors through host memory: this checks numbers, not speed.
``--device cpu`` does the same without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Methods that add up sums, move clients' memories, survey clients, and gather all rows.
WAYS = {
    "feddpc": [],
    "scaffold": [],
    "fedvarp": [],
    "fedcm": [],
    "feddpc, guard exclude": ["--set", "guard=exclude"],
    "fedavg, median": ["--rule", "median"],
}


def records(folder: Path, method: str, words: list[str], device: str, ranks: int) -> list[dict[str, Any]]:
    """Run a method and return its records without the times."""
    command = [sys.executable, "-m", "feddpc", "run", "--method", method, "--device", device, "--precision", "float64"]
    command += ["--clients", "20", "--cohort", "5", "--rounds", "4", "--quiet", "--out", str(folder), *words]
    subprocess.run(command + (["--ranks", str(ranks)] if ranks > 1 else []), check=True)
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [{key: value for key, value in record.items() if key != "seconds"} for record in lines]


def difference(left: Any, right: Any) -> float:
    """Return the largest difference between numbers; infinity where anything else differs."""
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right)
    return 0.0 if left == right else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    worst = 0.0
    for way, words in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            how = (way.split(",")[0], words, args.device)
            one, two = (records(Path(folder) / str(ranks), *how, ranks) for ranks in (1, 2))
        pairs = zip(one, two, strict=True)
        off = max(difference(a[key], b.get(key)) for a, b in pairs for key in a)
        print(f"{way}: largest difference {off:.1e}", flush=True)
        worst = max(worst, off)
    if worst > 1e-9:
        sys.exit(f"one process and two ranks differ by {worst:.1e}")


if __name__ == "__main__":
    main()
