"""What a round costs a stateless method as the population grows: time and memory must stay as they are."""

from __future__ import annotations

import statistics
import time
import tracemalloc

import numpy as np
import torch

from feddpc import methods
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.engine import sampler
from feddpc.engine.loop import Loop
from feddpc.engine.rounds import Federation, Progress, advance
from feddpc.quadratic import Quadratic


def main() -> None:
    print(f"FedDPC, d = 1,000, 10 clients a round, torch {torch.__version__}")
    print(f"{'population':>12}{'ms a round':>12}{'peak KB a round':>17}")
    for population in (100, 10_000, 1_000_000):
        a = torch.ones(50, 1000)
        partition = Partition.from_sizes(np.arange(population) % 50, np.ones(population, dtype=np.int64))
        federation = Federation(
            task=Quadratic(a, a),
            planner=Planner(partition, 1, 2, 0),
            sampler=sampler.make("uniform", population=population, cohort=10, seed=0),
            client_lr=0.1,
            server_lr=0.1,
        )
        method = methods.create("feddpc")
        progress = Progress.begin(method, torch.zeros(1000), population)
        advance(federation, method, Loop(), progress)
        times = []
        for _ in range(30):
            began = time.perf_counter()
            advance(federation, method, Loop(), progress)
            times.append(time.perf_counter() - began)
        tracemalloc.start()
        advance(federation, method, Loop(), progress)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{population:12,}{1e3 * statistics.median(times):12.2f}{peak / 1e3:17.1f}")


if __name__ == "__main__":
    main()
