"""Fuzz all readers: ``python tests/fuzz/everything.py [--minutes 60 | --runs 300]`` writes ``reports/fuzz.json``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from explore import ROOT, explore, targets

REPORTS = Path(os.environ.get("FEDDPC_REPORTS", ROOT / "reports"))


@dataclass(frozen=True)
class Outcome:
    """What came of fuzzing one reader: how long, how many inputs, how many branches they reached."""

    reader: str
    seconds: float
    inputs: int
    covered: int
    finding: str


def explored(names: list[str], workers: int, place: Path, limits: dict[str, int]) -> list[Outcome]:
    """Fuzz readers, each in a process forked from this one, since imports take longer than short work."""
    running: dict[int, tuple[str, float]] = {}
    outcomes = []
    for name in [*names, *[None] * workers]:
        if running and (name is None or len(running) == workers):
            pid, status = os.wait()
            reader, began = running.pop(pid)
            outcomes.append(outcome(reader, place, began, os.waitstatus_to_exitcode(status)))
        if name is None:
            continue
        running[(pid := os.fork())] = name, time.monotonic()
        if pid == 0:
            _alone(name, place, limits)
    return sorted(outcomes, key=lambda outcome: outcome.reader)


def outcome(name: str, place: Path, began: float, code: int) -> Outcome:
    """Return what came of a reader, from what its process said."""
    said = _log(place, name).read_text(errors="replace")
    counted, covered = re.search(r"number_of_executed_units: (\d+)", said), re.findall(r"cov: (\d+)", said)
    return Outcome(
        name,
        round(time.monotonic() - began, 1),
        int(counted[1]) if counted else 0,
        int(covered[-1]) if covered else 0,
        "" if code == 0 else said[-6000:] or f"it ended with {code}",
    )


def _alone(name: str, place: Path, limits: dict[str, int]) -> NoReturn:
    """Fuzz one reader, and end as a program does: libFuzzer writes down a finding at its end."""
    with _log(place, name).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    explore(name, place=place, **limits)
    sys.exit()


def _log(place: Path, name: str) -> Path:
    return place / f"{name}.log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all; every reader gets its share")
    parser.add_argument("--runs", type=int, help="inputs for every reader, instead of minutes; repeatable")
    parser.add_argument("--only", default="", help="names of readers with commas between them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--place", type=Path, default=ROOT / ".fuzz", help="where what is found is kept")
    asked = parser.parse_args()
    wanted = asked.only.split(",") if asked.only else sorted(targets.TARGETS)
    limits = {"runs": asked.runs} if asked.runs else {"seconds": share(asked.minutes * asked.workers, len(wanted))}
    asked.place.mkdir(parents=True, exist_ok=True)
    with targets.one_version():
        outcomes = explored(wanted, asked.workers, asked.place, limits | {"seed": asked.seed})
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / "fuzz.json").write_text(json.dumps(report(outcomes, asked.seed), indent=1) + "\n")
    for outcome in outcomes:
        print(f"{outcome.reader:20} {outcome.inputs:>10} inputs  {'FINDING' if outcome.finding else 'nothing found'}")
    for outcome in outcomes:
        if outcome.finding:
            print(f"\n{outcome.reader}:\n{outcome.finding}")
    sys.exit(any(outcome.finding for outcome in outcomes))


def share(minutes: float, readers: int) -> int:
    """Return how many seconds each reader gets."""
    return max(1, round(60 * minutes / readers))


def report(outcomes: list[Outcome], seed: int) -> dict[str, object]:
    """Return what is written down."""
    return {
        "minutes": round(sum(outcome.seconds for outcome in outcomes) / 60, 1),
        "inputs": sum(outcome.inputs for outcome in outcomes),
        "findings": sum(bool(outcome.finding) for outcome in outcomes),
        "seed": seed,
        "python": platform.python_version(),
        "atheris": version("atheris"),
        "readers": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    main()
