"""Draw docs/images/ranks.png from benchmarks/results/ranks-two-cores.json: time, memory and traffic of ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BLUE, ORANGE, GREY = "#1f5fa8", "#c8641e", "#888888"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, default=HERE / "results" / "ranks-two-cores.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images" / "ranks.png")
    args = parser.parse_args()
    found = json.loads(args.figures.read_text())
    figure, (speed, memory, traffic) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")

    rows = found["bench"]["workloads"][0]["rows"]
    bars = speed.bar([row["way"] for row in rows], [1e3 * row["round"] for row in rows], color=[GREY, BLUE, BLUE])
    speed.bar_label(bars, fmt="%.0f")
    speed.margins(y=0.12)
    speed.set(title="LeNet5, cohort 10, two cores", ylabel="ms per round, median")

    copies = {row["ranks"]: [] for row in found["large_model"]}
    for row in found["large_model"]:
        copies[row["ranks"]].append(row["copies"])
    bars = memory.bar([f"{n} rank" + "s" * (n > 1) for n in copies], [max(c) for c in copies.values()], color=BLUE)
    memory.bar_label(bars, fmt="%.2f")
    memory.axhline(6, color=ORANGE, linestyle="--", label="at most 6")
    memory.set(
        title="FedDPC, 100 million parameters, cohort 10", ylabel="copies of the model per rank, peak", ylim=(0, 7)
    )
    memory.legend(loc="lower right")

    cohorts = [10, 100, 1000, 10_000]
    traffic.loglog(cohorts, [1] * 4, "o-", color=BLUE, label="sums: FedDPC, FedAvg")
    traffic.loglog(cohorts, [2] * 4, "s-", color=GREY, label="sums: SCAFFOLD")
    traffic.loglog(cohorts, cohorts, "^-", color=ORANGE, label="all rows: robust rules")
    traffic.set(title="What travels, by the table of methods", xlabel="cohort", ylabel="vectors of d numbers per round")
    traffic.legend()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
