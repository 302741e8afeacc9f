"""What a round costs as cohort, population and model grow: a federation of any size with almost no local work.

`scale.py` measures it; the tests check that counts of operations follow the same laws.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from feddpc import methods, sampling
from feddpc.bench.clock import timed
from feddpc.config import Config
from feddpc.data.partition import Partition
from feddpc.experiment import Experiment
from feddpc.quadratic import Quadratic, quadratic_experiment
from feddpc.round.placement import ON_DEVICE, Placement
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs.engine_choice import ENGINES

STEPS = 2


@dataclass(frozen=True)
class Size:
    """One point of a scale law: clients make two local steps on quadratics of ``d`` dimensions."""

    population: int = 100
    cohort: int = 10
    d: int = 1000
    method: str = "feddpc"
    engine: str = "loop"

    def experiment(self) -> Experiment:
        """Return clients that each hold one of two samples; clients with a state are sampled in turn."""
        turns = self.method != "feddpc" and self.population % self.cohort == 0
        return quadratic_experiment(
            Quadratic(torch.ones(2, self.d), torch.tensor([[0.0], [1.0]]).repeat(1, self.d)),
            Partition.from_sizes(np.arange(self.population) % 2, np.ones(self.population, dtype=np.int64)),
            sampling.make(
                "cyclic" if turns else "uniform",
                population=self.population,
                cohort=self.cohort,
                seed=0,
                **({"groups": self.population // self.cohort} if turns else {}),
            ),
            torch.zeros(self.d),
            config=Config(lr=0.1, server_lr=0.1, clients=self.population, cohort=self.cohort, epochs=STEPS),
        )

    def start(self, placement: Placement = ON_DEVICE) -> Callable[[], object]:
        """Return a function that makes the next round."""
        experiment, method, engine = self.experiment(), methods.create(self.method), ENGINES[self.engine]()
        progress = RunState.begin(method, experiment.w0, self.population, placement)
        return lambda: run_round(experiment, method, engine, progress)


def measure(size: Size, rounds: int, warm: int = 1, placement: Placement = ON_DEVICE) -> dict:
    """Return the median time of a round and the most memory that warming up and rounds took beyond what was there."""
    run = size.start(placement)
    seconds: list[float] = []

    def make_rounds() -> None:
        for _ in range(warm):
            run()
        seconds.extend(timed(run)[0] for _ in range(rounds))

    peak = peak_memory(make_rounds)
    return {"seconds": statistics.median(seconds), "bytes": peak}


def peak_memory(work: Callable[[], object]) -> int | None:
    """Run ``work``; return the most memory that it took beyond what was resident, in bytes; None where not on Linux."""
    before = _reset_peak()
    work()
    peak = _resident("VmHWM")
    return None if peak is None or before is None else peak - before


def _reset_peak() -> int | None:
    """Forget the peak of this process's memory so far and return what is resident; None where Linux is not."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(field: str) -> int | None:
    try:
        return 1024 * int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])
    except (OSError, IndexError):
        return None
