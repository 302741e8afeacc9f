"""What a sweep costs beside its rounds."""

import os
import shutil
import time

from feddpc.round.round import RoundRecord
from feddpc.runs import runner
from feddpc.study import RunSpec, run_study, setup_cache
from sweeping import config

ITEMS, ROUNDS = 8, 20


def test_a_sweep_adds_less_than_a_fiftieth_to_its_rounds(tmp_path, monkeypatch):
    """Items as small as they come: twenty rounds of the small network on digits, with the paper's cohort."""
    small = {"model": "cnn", "model_options": {}, "clients": 100, "cohort": 10, "batch_size": None, "rounds": ROUNDS}
    wanted = [RunSpec(config(method="fedavg", lr=0.01 * (i + 1), **small)) for i in range(ITEMS)]
    first = run_study(wanted[:1], tmp_path / "real")
    rounds = first[0].seconds_per_round * ROUNDS

    def at_once(federation, method, engine, progress):
        """A round that takes no time."""
        progress.round += 1
        ten = list(range(10))
        metrics = {"test_accuracy": 0.5, "test_loss": 1.0, "validation_accuracy": 0.5, "validation_loss": 1.0}
        return RoundRecord(progress.round, 1.0, 0.0, ten, [], [], {"mean_scale": 1.0}, metrics=metrics)

    monkeypatch.setattr(runner, "run_round", at_once)

    def sweep():
        shutil.rmtree(tmp_path / "empty", ignore_errors=True)
        run_study(wanted, tmp_path / "empty")

    def bare():
        for item in wanted:
            runner.execute(setup_cache.experiment(item.complete))

    added = (least(sweep) - least(bare)) / ITEMS
    assert added < 0.02 * rounds


def test_an_item_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    run_study([RunSpec(config())], tmp_path)
    assert waited == []


def least(work, times=6):
    """The shortest of several measurements: what disturbs can only add."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)
