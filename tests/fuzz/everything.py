"""Fuzz all readers: ``python tests/fuzz/everything.py --minutes 60`` writes ``reports/fuzz.json``."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REPORTS = Path(os.environ.get("FEDDPC_REPORTS", ROOT / "reports"))


def names() -> list[str]:
    """Return the targets: those that have a corpus."""
    return sorted(path.name for path in (HERE / "corpus").iterdir())


def explore(name: str, *options: str) -> dict[str, object]:
    """Fuzz one reader in a process of its own and return what it says."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / "explore.py"), name, *options]
    # Hashes of texts decide the order of sets, and with it which branch comes first.
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False
    )
    counted = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    finding = "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-4000:]
    return {
        "target": name,
        "seconds": round(time.monotonic() - began, 1),
        "inputs": int(counted[1]) if counted else 0,
        "covered": int(covered[-1]) if covered else 0,
        "finding": finding,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all; every reader gets its share")
    parser.add_argument("--only", default="", help="names of readers with commas between them")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    wanted = asked.only.split(",") if asked.only else names()
    workers = max(1, (os.cpu_count() or 1))
    seconds = max(1, round(60 * asked.minutes * workers / len(wanted)))
    options = (f"--seconds={seconds}", f"--seed={asked.seed}")
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda name: explore(name, *options), wanted))
    report = {
        "minutes": round(sum(float(str(r["seconds"])) for r in results) / 60, 1),
        "inputs": sum(int(str(r["inputs"])) for r in results),
        "findings": sum(bool(r["finding"]) for r in results),
        "seed": asked.seed,
        "readers": results,
    }
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / "fuzz.json").write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        outcome = "FINDING" if result["finding"] else "nothing found"
        print(f"{result['target']:20} {result['inputs']:>10} inputs  {outcome}")
    for result in results:
        if result["finding"]:
            print(f"\n{result['target']}:\n{result['finding']}")
    sys.exit(bool(report["findings"]))


if __name__ == "__main__":
    main()
