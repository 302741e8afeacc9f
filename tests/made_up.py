"""Studies whose outcome is known beforehand: every accuracy, loss and factor is made up."""

import dataclasses
from pathlib import Path

from feddpc.paper import presets, published
from feddpc.paper.study import PaperRow
from feddpc.paper.study_spec import DOUBLED, label
from feddpc.runs.stored import StoredRun


def stored(config, accuracy, *, loss=None, status="finished", seconds=0.5, **notes):
    """A run with these accuracies; ``notes`` are values of every round."""
    records = [
        {"round": t, "test_accuracy": a, "train_loss": 1.0 if loss is None else loss[t - 1], "seconds": seconds}
        | {"test_loss": 1.0, "participants": [0, 1], "dropped": [], "rejected": []}
        | notes
        for t, a in enumerate(accuracy, start=1)
    ]
    about = {"torch": "2.0", "device": "cpu", "cores": 2, "engine": config.engine}
    return StoredRun(Path("nowhere"), config, records, {"status": status, "rounds": len(records)}, about)


def planned(part, name, *, text=None, alpha=0.2, seeds=(0, 1, 2), **config):
    method = "fedavg" if name == DOUBLED or name.startswith("step") else "feddpc"
    method = name if name in (*published.METHODS, "fedavg", "fedavgm") else method
    made = presets.preset("digits", method, scale="tiny", alpha=alpha, **config)
    return PaperRow(part, alpha, name, text or name, made, tuple(seeds))


def row(
    part, name, best, *, rounds=4, text=None, alpha=0.2, seeds=None, status="finished", seconds=0.5, loss=1.0, **notes
):
    """A row whose seeds reach the accuracies ``best`` in their last round, half of it in all rounds before."""
    seeds = tuple(range(len(best))) if seeds is None else seeds
    about = planned(part, name, text=text, alpha=alpha, seeds=seeds, rounds=rounds)
    runs = {
        seed: stored(
            about.with_seed(seed),
            [round(value / 2, 5)] * (rounds - 1) + [round(value, 5)],
            loss=[loss + 0.001 * seed] * rounds,
            status=status,
            seconds=seconds,
            **notes,
        )
        for seed, value in zip(seeds, best, strict=False)
    }
    return dataclasses.replace(about, runs=runs)


def table2(alpha=0.2, **accuracies):
    """The rows of Table 2 with these mean accuracies; seeds differ alike for all, and a bit by method."""
    wiggle = (-0.01, 0.0, 0.01, 0.004, -0.004)
    rows = []
    for place, (name, mean) in enumerate(accuracies.items()):
        name = name.replace("_", " ")
        best = [mean + w + 0.0005 * ((place + seed) % 3) for seed, w in enumerate(wiggle)]
        extra = {"mean_scale": 2.01, "mean_cosine": -0.1} if name == "feddpc" else {}
        rows.append(row("table2", name, best, text=label(name), alpha=alpha, **extra))
    return rows


#: Means in the paper's order on CIFAR-10, alpha 0.2, far apart.
PAPERS_ORDER = {
    **{"fedprox": 0.45, "fedexp": 0.60, "fedga": 0.50, "fedcm": 0.65, "fedvarp": 0.55, "feddpc": 0.70},
    **{"fedavg": 0.45, "fedavg_x2": 0.68, "fedavgm": 0.62, "feddpc_momentum": 0.66},
}
