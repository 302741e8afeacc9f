"""How long honest clients' updates are, compared with the median that the adaptive bound on norms takes.

    python benchmarks/honest_norms.py [--rounds 60] [--seeds 2] [--methods fedavg,feddpc,scaffold]

No client misbehaves here: every refusal of a bound is a mistake. Clients differ in labels, in sizes or in both,
cohorts are small (the median is then one of few), rates change, batches are single samples. For every configuration,
the largest ratio of a reply's norm to the median of the last 100 is printed, in the first five rounds and in all, and
how many replies factors of 3, 10 and 30 would have refused.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import feddpc
from feddpc.methods.base import State
from feddpc.robust.defense import Defense, _norms

FACTORS = (3, 10, 30)
DIGITS = {"data": "digits", "clients": 20, "lr": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "labels, alpha 0.1": {"partition": "dirichlet-equal", "partition_options": {"alpha": 0.1}},
    "two labels per client": {"partition": "shards"},
    "labels and sizes, alpha 0.05": {"partition": "dirichlet", "partition_options": {"alpha": 0.05}},
    "sizes, alpha 0.1": {"partition": "quantity", "partition_options": {"alpha": 0.1}},
    "sizes, alpha 0.1, batches of 1": {
        "partition": "quantity",
        "partition_options": {"alpha": 0.1},
        "batch_size": 1,
        "lr": 0.01,
    },
    "sizes, alpha 0.1, 5 epochs, momentum": {
        "partition": "quantity",
        "partition_options": {"alpha": 0.1},
        "epochs": 5,
        "lr": 0.02,
        "client_optimizer": {"name": "sgd", "momentum": 0.9},
    },
    "labels and sizes, Adam at the clients": {
        "partition": "dirichlet",
        "partition_options": {"alpha": 0.1},
        "client_optimizer": "adam",
        "lr": 0.003,
    },
    "labels and sizes, warm-up": {
        "partition": "dirichlet",
        "partition_options": {"alpha": 0.1},
        "lr_schedule": "warmup",
    },
    "regression (diabetes), sizes": {
        "data": "diabetes",
        "partition": "quantity",
        "partition_options": {"alpha": 0.3},
        "clients": 10,
        "lr": 0.02,
    },
}


class Watch:
    """Notes the ratio of every reply's norm to the median that a bound would use."""

    def __init__(self) -> None:
        self.rounds: list[Tensor] = []

    def __call__(self, defense: Defense, up: State, trained: Tensor, memory: State) -> tuple[Tensor, State]:
        """Let everybody through."""
        memory, ratios = dict(memory), []
        for key, rows in up.items():
            own = _norms(rows).double()
            pool = torch.cat([memory.get(f"norms.{key}", own[:0]), own])[-max(defense.window, len(own)) :]
            memory[f"norms.{key}"] = pool
            if float(pool.median()) > 0:
                ratios.append(own / pool.median())
        self.rounds.append(torch.stack(ratios).max(0).values if ratios else torch.zeros(0))
        return torch.ones_like(trained), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", default="fedavg,feddpc,scaffold")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| clients differ in | method | cohort | largest, rounds 1-5 | largest | beyond 3 | 10 | 30 | replies |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, case), method, cohort in itertools.product(CASES.items(), asked.methods.split(","), (2, 10)):
        if method == "scaffold" and {"client_optimizer", "lr_schedule"} & case.keys():
            continue
        early, everything = [], []
        for seed in range(asked.seeds):
            watch = Watch()
            with mock.patch.object(Defense, "screen", lambda self, *args, _watch=watch: _watch(self, *args)):
                feddpc.simulate(
                    **{**DIGITS, **case, "cohort": cohort, "method": method, "seed": seed},
                    rounds=asked.rounds,
                    screen={"norm": 1e6},
                    engine="loop",
                    evaluate_every=asked.rounds,
                )
            early.append(torch.cat(watch.rounds[:5]))
            everything.append(torch.cat(watch.rounds))
        first, ratios = torch.cat(early), torch.cat(everything)
        beyond = " | ".join(str(int((ratios > factor).sum())) for factor in FACTORS)
        print(
            f"| {name} | {method} | {cohort} | {first.max():.3g} | {ratios.max():.3g} | {beyond} | {len(ratios)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
