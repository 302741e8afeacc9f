"""Does FedDPC's projection survive the noise of differential privacy? Cosines, scales and accuracies against the noise.

Digits, 400 clients with equal shares (Dirichlet, alpha 0.2), about 100 of them a round by independent coins, an MLP
with 64 hidden units (d = 4810), 60 rounds. Four arms, in pairs that would be alike if there were no projection:

    FedAvg,  clip C,  step eta          FedDPC, clip C,  step eta      (a clip that always binds undoes the scaling)
    FedAvg,  clip C,  step 2 eta        FedDPC, clip 2C, step eta      (lambda = 1: FedDPC's vectors are twice as long)

``plain`` is without clip and noise, noise 0 is the clip alone. Accuracy is the mean of the last ten rounds; cosine and
scale are means over clients and rounds, from round 2 on. Writes JSON and, with --picture, a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np

from feddpc import methods
from feddpc.bench import machine
from feddpc.build import build
from feddpc.config import Config
from feddpc.policies import Policies
from feddpc.runs.runner import execute

CLIP, RATE = 0.3, 0.1
ARMS = {
    "FedAvg, clip C": ("fedavg", CLIP, RATE),
    "FedDPC, clip C": ("feddpc", CLIP, RATE),
    "FedAvg, clip C, double step": ("fedavg", CLIP, 2 * RATE),
    "FedDPC, clip 2C": ("feddpc", 2 * CLIP, RATE),
}
LEVELS = (None, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
COLOURS = ("#0077bb", "#cc3311", "#33bbee", "#ee7733")
SETTING = {
    "clients": 400,
    "cohort": 100,
    "partition": "dirichlet-equal",
    "participation": "poisson",
    "model": "mlp",
    "batch_size": 8,
    "lr": RATE,
    "engine": "loop",
    "device": "cpu",
    "threads": 1,
}


def run(arm: str, noise: float | None, seed: int, rounds: int) -> dict:
    """One run: what it reached, and how updates lay to the last global update."""
    method, clip, server_lr = ARMS[arm]
    terms = {} if noise is None else {"clip": clip, "noise": noise or 1.0}
    values = {**SETTING, "server_lr": server_lr, "seed": seed, "rounds": rounds, "privacy": terms}
    setting = build(Config.read(values))
    if noise == 0:  # no configuration asks for that: it promises nothing
        bare = dataclasses.replace(setting.policies.privacy, noise=0.0)
        setting = dataclasses.replace(setting, policies=Policies(privacy=bare))
    outcome = execute(setting, method=methods.create(method))

    def mean(key: str) -> float | None:
        values = [r[key] for r in outcome.records[1:] if r.get(key) is not None]
        return statistics.fmean(values) if values else None

    return {
        "accuracy": outcome.summary["last10_accuracy"],
        "cosine": mean("mean_cosine"),
        "scale": mean("mean_scale"),
        "clipped": mean("clipped"),
        "epsilon": outcome.summary.get("epsilon"),
        "d": outcome.w.numel(),
    }


def point(arm: str, noise: float | None, seeds: int, rounds: int) -> dict:
    """All seeds of one arm at one level: means, and the deviation of the accuracy."""
    found = [run(arm, noise, seed, rounds) for seed in range(seeds)]
    means = {k: None if found[0][k] is None else statistics.fmean(f[k] for f in found) for k in found[0]}
    spread = statistics.stdev(f["accuracy"] for f in found) if seeds > 1 else None
    share = None if noise is None else noise * math.sqrt(found[0]["d"]) / SETTING["cohort"]
    return {"arm": arm, "noise": noise, **means, "accuracy_deviation": spread, "noise_over_bound": share}


def draw(points: list[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    names = ["plain" if level is None else f"{level:g}" for level in LEVELS]
    for (arm, (method, *_)), colour in zip(ARMS.items(), COLOURS, strict=True):
        mine = [p for p in points if p["arm"] == arm]
        accuracy = 100 * np.array([p["accuracy"] for p in mine])
        spread = 100 * np.array([p["accuracy_deviation"] or 0.0 for p in mine])
        panels[0].errorbar(names, accuracy, spread, fmt="o-", color=colour, capsize=3, label=arm)
        if method == "feddpc":
            panels[1].plot(names, [p["cosine"] for p in mine], "o-", color=colour, label=arm)
            panels[2].plot(names, [p["scale"] - 2 for p in mine], "o-", color=colour, label=arm)
    d = points[0]["d"]
    panels[1].axhline(1 / math.sqrt(d), color="#555555", linestyle=":", label="1/√d, a random direction")
    panels[2].axhline(1 / (2 * d), color="#555555", linestyle=":", label="1/(2d), a random direction")
    panels[2].set_yscale("log")
    panels[0].set(title="test accuracy (%), last ten rounds")
    panels[1].set(title="mean cosine of updates to the last step")
    panels[2].set(title="mean scale, less 1 + lambda = 2")
    for axis in panels:
        axis.set_xlabel("noise, in multiples of the clip")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    parser.add_argument("--picture", type=Path, help="a PNG")
    args = parser.parse_args()
    facts, points = machine.describe("cpu"), []
    heads = ("accuracy %", "+-", "epsilon", "cosine", "scale", "clipped", "noise/bound")
    print(f"{'noise':>6}  {'arm':28}" + "".join(f"{head:>12}" for head in heads))
    for level in LEVELS:
        for arm in ARMS:
            p = point(arm, level, args.seeds, args.rounds)
            points.append(p)
            texts = [f"{100 * p['accuracy']:.2f}", f"{100 * (p['accuracy_deviation'] or 0):.2f}"]
            for key, form in (("epsilon", ".2f"), ("cosine", ".4f"), ("scale", ".5f"), ("clipped", ".2f")):
                texts.append("-" if p[key] is None else format(p[key], form))
            texts.append("-" if level is None else f"{p['noise_over_bound']:.2f}")
            print(
                f"{'plain' if level is None else level:>6}  {arm:28}" + "".join(f"{t:>12}" for t in texts), flush=True
            )
    if args.out:
        about = {"seeds": args.seeds, "rounds": args.rounds, "clip": CLIP, **SETTING}
        args.out.write_text(json.dumps({"machine": facts, "setting": about, "points": points}, indent=1) + "\n")
    if args.picture:
        draw(points, args.picture)


if __name__ == "__main__":
    main()
