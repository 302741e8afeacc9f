"""Many cheap rounds: running means do not drift, memory does not grow, no file stays open."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from feddpc import methods, sampling
from feddpc.config import Config
from feddpc.data.partition import Partition
from feddpc.engines.loop import Loop
from feddpc.quadratic import Quadratic, quadratic_experiment
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.record import RunFolder

CLIENTS, D = 10, 4
#: Rounds between two checkpoints.
EVERY = 250


class Measured(Quadratic):
    """Quadratics whose test loss is the norm of the model."""

    def evaluate(self, w):
        return {"loss": float(w.norm())}


def federation():
    rng = np.random.default_rng(0)
    curvature, centre = (torch.tensor(x, dtype=torch.float32) for x in rng.uniform(0.5, 2, (2, CLIENTS, D)))
    world = quadratic_experiment(
        Measured(curvature, centre),
        Partition.from_lists([[j] for j in range(CLIENTS)]),
        sampling.make("uniform", population=CLIENTS, cohort=2, seed=0),
        torch.zeros(D),
        config=Config(lr=0.1, server_lr=0.1, epochs=1),
    )
    return replace(world, evaluates=True)


def resident():
    """Bytes of this process in memory, from Linux's counters."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def drift(name, rounds, folder):
    """Run with records and checkpoints; return the progress, and memory and open files along the way."""
    method, world = methods.create(name), federation()
    progress = RunState.begin(method, torch.zeros(D), CLIENTS)
    run = RunFolder.create(folder)
    seen = []
    try:
        run.begin(Config())
        for _ in range(rounds // EVERY):
            for _ in range(EVERY):
                record = run_round(world, method, Loop(), progress)
                assert record.diverged is None
                run.append(record)
            checkpoint.save(run.checkpoint, progress, run.records.mark)
            seen.append((resident(), open_files()))
    finally:
        run.close()
    return progress, seen


def check(rounds, folder, growth):
    progress, seen = drift("fedvarp", rounds, folder)
    _, table = progress.slots.export()
    true = table["y"].double().mean(0)
    # The running mean is a float64 sum of float32 rows, each added and taken away exactly but for its last bits.
    assert float((progress.server["ybar"] - true).norm()) <= 1e-14 * rounds**0.5 * float(table["y"].double().norm())
    memory, files = zip(*seen, strict=True)
    warm = len(memory) // 5
    assert max(memory[warm:]) - memory[warm] < growth
    assert len(set(files)) == 1


def test_some_thousand_rounds(tmp_path):
    check(2500, tmp_path / "run", growth=4 << 20)


@pytest.mark.slow
def test_a_hundred_thousand_rounds(tmp_path):
    check(100_000, tmp_path / "run", growth=8 << 20)


@pytest.mark.parametrize(("name", "mean", "row"), [("mifa", "Gbar", "G"), ("scaffold", "c", "c"), ("feddyn", "H", "h")])
def test_other_running_means_stay_with_their_tables(name, mean, row, tmp_path):
    """MIFA's is of what the server remembers, SCAFFOLD's and FedDyn's of what the clients do: these send float32."""
    progress, _ = drift(name, 500, tmp_path / "run")
    _, table = (progress.slots if name == "mifa" else progress.clients).export()
    true = table[row].double().mean(0)
    exact = 1e-12 if name == "mifa" else 1e-4
    assert float((progress.server[mean] - true).norm()) <= exact * float(table[row].double().norm())
