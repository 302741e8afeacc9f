"""Scale laws: time and memory of a round against cohort, population, parameters, and where client states lie.

Clients make two steps on quadratics, so that what is seen is the round itself: drawing, planning, vectors, the server
rule (FedDPC), memories (SCAFFOLD, every client seen before the clock starts). Every point runs in a process of its own,
for the sake of the peak of memory, on one thread, so that other work on the machine matters less. Writes JSON and, with
--picture, a figure of four panels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from feddpc.bench import machine
from feddpc.round.placement import Placement, available_memory
from scale_laws import Size, measure

ENGINES = ("loop", "stacked")
KINDS = ("device", "host", "disk")


def points(largest: int) -> list[dict]:
    """All points: the panel, the line in it, the size, and where client states lie."""
    found = []
    for engine in ENGINES:
        base = Size(engine=engine)
        for cohort in (10, 30, 100, 300, 1000):
            found.append(("cohort", engine, replace(base, population=1000, cohort=cohort, d=10_000), None))
        for population in (100, 1000, 10_000, 100_000, 1_000_000):
            found.append(("population", engine, replace(base, population=population), None))
        for d in (10**k for k in range(4, 9) if 10**k <= largest):
            found.append(("parameters", engine, replace(base, d=d), None))
    for kind in KINDS:
        for d in (10_000, 100_000, 1_000_000, 4_000_000):
            found.append(("client state", kind, Size(d=d, method="scaffold"), kind))
    return [{"panel": p, "line": n, "kind": k, **asdict(s)} for p, n, s, k in found]


def run(point: dict) -> dict:
    """Measure one point, here."""
    size = Size(**{k: point[k] for k in asdict(Size())})
    # Updates are there one by one and stacked, nine times under vmap; client states twice while a table grows.
    states = 2 * size.population if size.method != "feddpc" and point["kind"] != "disk" else 0
    needed = 4 * size.d * ((2 if size.engine == "loop" else 9) * size.cohort + states)
    if needed > available_memory() // 2:
        return {"error": f"needs about {needed / 1e9:.0f} GB, more than half of what is free"}
    rounds = 3 if size.cohort * size.d > 1e6 else 11
    warm = size.population // size.cohort if point["kind"] else 1
    torch.set_num_threads(1)
    replace(size, population=4, cohort=2, d=8).start()()  # loads what the engine needs
    with tempfile.TemporaryDirectory() as folder:
        return measure(size, rounds, warm, Placement(point["kind"] or "device", Path(folder)))


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    axes_of = {"cohort": "cohort", "population": "population", "parameters": "d", "client state": "d"}
    titles = {
        "cohort": "Cohort (1,000 clients, d = 10,000)",
        "population": "Population (10 a round, d = 1,000)",
        "parameters": "Parameters d (10 of 100 clients)",
        "client state": "Client state, SCAFFOLD (10 of 100 clients)",
    }
    colours = {"loop": "#1f5fa8", "stacked": "#c8641e", "device": "#1f5fa8", "host": "#c8641e", "disk": "#2f8f4e"}
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (panel, key) in zip(panels.flat, axes_of.items(), strict=True):
        memory = axis.twinx()
        for line in dict.fromkeys(r["line"] for r in rows if r["panel"] == panel):
            mine = [r for r in rows if r["panel"] == panel and r["line"] == line and "seconds" in r]
            x = [r[key] for r in mine]
            axis.plot(x, [r["seconds"] for r in mine], "o-", color=colours[line], label=f"{line}, time")
            known = [r for r in mine if r["bytes"]]
            memory.plot(
                [r[key] for r in known],
                [r["bytes"] / 1e6 for r in known],
                "s--",
                color=colours[line],
                alpha=0.55,
                markersize=4,
                label=f"{line}, memory",
            )
        axis.set(xscale="log", yscale="log", title=titles[panel], xlabel=panel if panel != "client state" else "d")
        axis.set_ylabel("seconds per round (solid)")
        memory.set_yscale("log")
        memory.set_ylabel("peak memory, MB (dashed)")
        axis.grid(alpha=0.3)
        if panel == "population":  # flat lines should look flat
            axis.set_ylim(1e-3, 1e-1)
            memory.set_ylim(0.1, 100)
        handles = [h for a in (axis, memory) for h in a.get_legend_handles_labels()[0]]
        axis.legend(handles, [h.get_label() for h in handles], fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    parser.add_argument("--picture", type=Path, help="a PNG")
    parser.add_argument("--largest", type=int, default=10_000_000, help="d goes up to this")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(run(json.loads(args.point))))
        return
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # as the feddpc command has it
    facts, rows = machine.describe("cpu"), []
    print(f"one thread, torch {facts['torch']}, load {facts['load']:.1f}, {facts['date']}")
    print(f"{'panel':14}{'line':9}{'population':>11}{'cohort':>8}{'d':>13}{'ms per round':>12}{'MB':>10}")
    for point in points(args.largest):
        command = [sys.executable, __file__, "--point", json.dumps(point)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        result = json.loads(done.stdout) if done.returncode == 0 else {"error": f"exit code {done.returncode}"}
        rows.append(point | result)
        head = f"{point['panel']:14}{point['line']:9}{point['population']:11,}{point['cohort']:8,}{point['d']:13,}"
        if "error" in result:
            print(f"{head}  {result['error']}", flush=True)
            continue
        size = "-" if result["bytes"] is None else f"{result['bytes'] / 1e6:.1f}"
        print(f"{head}{1e3 * result['seconds']:12.2f}{size:>10}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": facts, "points": rows}, indent=1) + "\n")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
