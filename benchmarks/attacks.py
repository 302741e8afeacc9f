"""How FedDPC and FedAvg fare when some clients are hostile, with the plain mean and with every robust rule.

Digits, 100 clients, 20 a round, an MLP. Every cell is the mean over seeds of the test accuracy over the last ten
rounds; a run that diverged counts as a guess (10%). The robust rules are told a hostile share of 0.4, whatever it is.
"screen" is the plain mean behind the adaptive norm bound. Writes benchmarks/results/attacks.json, and with --figure the
picture of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddpc.bench.machine import describe
from feddpc.build import build
from feddpc.config import Config
from feddpc.runs.runner import execute

BASE = {
    "data": "digits",
    "clients": 100,
    "cohort": 20,
    "model": "mlp",
    "model_options": {"hidden": [32]},
    "batch_size": 32,
    "lr": 0.3,
    "engine": "stacked",
    "device": "cpu",
    "threads": 1,
}
PARTITIONS = {"alpha 0.6": {"alpha": 0.6}, "iid": {"partition": "iid"}}
METHODS = {
    "fedavg": {"method": "fedavg"},
    "feddpc": {"method": "feddpc", "hyper": {"max_scale": 10.0}},
    "feddpc uncapped": {"method": "feddpc", "hyper": {"max_scale": 0.0}},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "sign flip": {"kind": "sign_flip"},
    "times -10": {"kind": "scaled", "scale": -10.0},
    "colluding": {"kind": "colluding"},
    "parallel": {"kind": "parallel"},
    "parallel, tilted": {"kind": "parallel", "tilt": 0.12},
}
ASSUMED = {"share": 0.4}
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "screen": {"screen": {"norm": 3.0}},
    "median": {"rule": "median"},
    "trimmed_mean": {"rule": "trimmed_mean", "rule_options": ASSUMED},
    "krum": {"rule": "krum", "rule_options": ASSUMED},
    "multi_krum": {"rule": "multi_krum", "rule_options": ASSUMED},
    "centered_clipping": {"rule": "centered_clipping"},
    "geometric_median": {"rule": "geometric_median"},
}


def cells(shares: list[float]) -> Iterator[tuple[str, str, str, float, str]]:
    """Yield partition, method, attack, share and defense; only what tells something, the rest would double the time."""
    for partition in PARTITIONS:
        for method in METHODS:
            for attack in ATTACKS:
                parallel = attack.startswith("parallel")
                if attack == "parallel, tilted" and method == "fedavg":
                    continue
                if method == "feddpc uncapped" and (not parallel or partition == "iid"):
                    continue
                for share in shares:
                    if share == 0 and attack != "sign flip":
                        continue
                    if partition == "iid" and share not in (0.0, 0.3):
                        continue
                    for defense in DEFENCES:
                        yield partition, method, attack if share else "none", share, defense


def accuracy(cell: tuple[str, str, str, float, str], rounds: int, seed: int) -> tuple[float, bool]:
    """Run one cell with one seed; return the accuracy over the last ten rounds, and whether it diverged."""
    partition, method, attack, share, defense = cell
    faults = {}
    if share:
        faults = {k: v for k, v in ATTACKS[attack].items() if k != "kind"} | {ATTACKS[attack]["kind"]: share}
    values = BASE | PARTITIONS[partition] | METHODS[method] | DEFENCES[defense]
    outcome = execute(build(Config.read(values | {"faults": faults, "rounds": rounds, "seed": seed})))
    diverged = outcome.status == "diverged"
    return (0.1 if diverged else outcome.summary["last10_accuracy"]), diverged


def study(rounds: int, seeds: int, shares: list[float]) -> dict[str, Any]:
    rows = []
    began = time.perf_counter()
    for cell in cells(shares):
        runs = [accuracy(cell, rounds, seed) for seed in range(seeds)]
        scores = [score for score, _ in runs]
        names = ("partition", "method", "attack", "share", "defense")
        rows.append(
            dict(zip(names, cell, strict=True))
            | {"accuracy": round(float(np.mean(scores)), 4), "seeds": [round(s, 4) for s in scores]}
            | {"diverged": sum(diverged for _, diverged in runs)}
        )
        print(f"{time.perf_counter() - began:6.0f} s  {rows[-1]}", flush=True)
    about = {"rounds": rounds, "seeds": seeds, "base": BASE, "assumed": ASSUMED, "attacks": ATTACKS}
    about |= {"defenses": DEFENCES, "methods": METHODS, "honest": honest(rounds)}
    return {"machine": describe("cpu"), "seconds": round(time.perf_counter() - began), **about, "rows": rows}


def honest(rounds: int) -> dict[str, Any]:
    """Count the updates of honest runs whose factor would be above some bounds, in FedDPC at lambda = 1."""
    worlds = [
        {"model": model, "model_options": {}, "alpha": alpha, "lr": lr, "cohort": 10}
        for model in ("cnn", "mlp")
        for alpha in (0.2, 0.6)
        for lr in (0.03, 0.1, 0.3)
    ]
    above = {}
    for bound in (3.0, 4.0, 10.0):
        runs = [
            execute(build(Config.read(BASE | world | {"hyper": {"max_scale": bound}, "rounds": rounds})))
            for world in worlds
        ]
        above[str(bound)] = int(sum(record["capped"] for run in runs for record in run.records))
    updates = sum(len(record["participants"]) for run in runs for record in run.records)
    return {"worlds": worlds, "rounds": rounds, "updates": updates, "above": above}


def written(found: dict[str, Any]) -> str:
    """Return JSON with a line a cell."""
    head = json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["rows"])
    return head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw accuracy over the hostile share: a panel a method and attack, a line a defense."""
    from matplotlib.figure import Figure

    from feddpc.report.figures import DARK

    attacks = list(ATTACKS)[:4]
    panels = [[("fedavg", attack) for attack in attacks], [("feddpc", attack) for attack in attacks]]
    panels[1].append(("feddpc uncapped", "parallel"))
    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots(2, 5, sharex=True, sharey=True)
    rows = [r for r in found["rows"] if r["partition"] == "alpha 0.6"]
    for i, line in enumerate(panels):
        for j, (method, attack) in enumerate(line):
            # Without a hostile client the largest factor is never met, so both FedDPCs start from the same numbers.
            start = [r for r in rows if r["method"] == method.split()[0] and r["attack"] == "none"]
            mine = [r for r in rows if r["method"] == method and r["attack"] == attack]
            for colour, defense in zip(DARK, DEFENCES, strict=False):
                points = [(r["share"], 100 * r["accuracy"]) for r in start + mine if r["defense"] == defense]
                look = {"color": colour, "linewidth": 2.5 if defense == "mean" else 1.2, "label": defense}
                axes[i][j].plot(*zip(*points, strict=True), marker="o", markersize=3, **look)
            axes[i][j].set_title(f"{method}: {attack}", fontsize=10)
            axes[i][j].grid(alpha=0.3)
    axes[0][4].axis("off")
    axes[0][4].legend(*axes[0][0].get_legend_handles_labels(), loc="center", fontsize=9)
    figure.supxlabel("share of hostile clients")
    figure.supylabel("test accuracy, last ten rounds (%)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attacks.json"))
    parser.add_argument("--figure", type=Path, help="draw the picture of --out, after making it unless it is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not (args.figure and args.out.exists()):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(written(study(args.rounds, args.seeds, args.shares)))
    if args.figure:
        draw(json.loads(args.out.read_text()), args.figure)


if __name__ == "__main__":
    main()
