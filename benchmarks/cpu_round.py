"""A round on a CPU with the real CIFAR-10, engines against the plain eager loop, turn by turn in one process.

`feddpc bench --against eager` does the same on random bytes.
"""

from __future__ import annotations

import argparse

import torch

from feddpc.bench.turns import measure
from feddpc.bench.workloads import WORKLOADS, Workload
from feddpc.data import Dataset, load


class Real(Workload):
    """The same work on the images themselves."""

    def data(self) -> Dataset:
        return load("cifar10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engines", default="loop,threads")
    parser.add_argument("--method", default="feddpc")
    args = parser.parse_args()
    cifar = WORKLOADS["cifar10"]
    workload = Real(**{name: getattr(cifar, name) for name in Workload.__dataclass_fields__})
    found = measure(
        workload,
        device="cpu",
        names=[args.method],
        engines=args.engines.split(","),
        against="eager",
        rounds=args.rounds,
    )
    print(
        f"{found['model']}, {args.method}, {torch.get_num_threads()} threads, torch {torch.__version__}; ms per round"
    )
    for row in found["rows"]:
        if "error" in row:
            print(f"{row['way']:10} {row['error']}")
            continue
        whole, training, evaluation = (1e3 * row[key] for key in ("round", "training", "evaluation"))
        print(
            f"{row['way']:10} round {whole:7.1f}   training {training:7.1f}   evaluation {evaluation:7.1f}"
            f"   against eager: round {row['speed']:.2f}, training {row['training_speed']:.2f}"
        )


if __name__ == "__main__":
    main()
