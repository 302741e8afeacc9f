"""The work in feddpc, or in the plain eager loop that `feddpc bench --against eager` runs."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import feddpc
from feddpc import methods
from feddpc.bench.eager import Eager
from feddpc.bench.workloads import WORKLOADS
from feddpc.build import build
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs.engine_choice import choose_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--way", default="auto", help="eager, auto or an engine")
    args = parser.parse_args()
    with np.load(args.work) as file:
        data = Dataset.from_arrays(*(file[k] for k in ("x_train", "y_train", "x_test", "y_test")), classes=10)
        partition = Partition(file["order"], file["starts"])
    setting = build(WORKLOADS["cifar10"].config(device="cpu"), data=data, partition=partition)
    if args.way == "eager":
        run, label = Eager(setting), "plain eager loop"
    else:
        method = methods.create("fedavg")
        engine = choose_engine(args.way, setting, method)
        progress = RunState.begin(method, setting.w0, len(partition))
        label = f"feddpc {feddpc.__version__}, {engine.name}"

        def run() -> float:
            return run_round(setting, method, engine, progress).metrics["test_accuracy"]

    seconds, accuracy = [], []
    for _ in range(args.rounds + 2):
        began = time.perf_counter()
        accuracy.append(run())
        seconds.append(time.perf_counter() - began)
    found = {"system": label, "torch": torch.__version__, "seconds": seconds[2:], "accuracy": accuracy}
    args.out.write_text(json.dumps(found | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
