"""Validation data: nobody trains on them, every engine and method is judged on them, and nothing else changes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc import methods, simulate
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError
from feddpc.method_changes import for_method
from feddpc.runs.record import read_records
from feddpc.runs.runner import execute
from feddpc.validation import held_out
from support import VARIANTS, blobs, run_rounds, tiny_net, uneven

VALIDATION = ("validation_accuracy", "validation_loss")


def judged(validation=0.2, data=None, **values):
    """A federation of eight uneven clients of which none loses all its samples."""
    known = {"cohort": 4, "clients": 8, "batch_size": 4, "precision": "float64", "rounds": 6, "lr": 0.05}
    config = Config.read({**known, "device": "cpu", "engine": "loop", "validation": validation, **values})
    deal = uneven(120, (8, 17, 9, 12, 30, 11, 15, 14))
    return build(config, data=data or blobs(120), module=tiny_net(), partition=deal)


def dealt(share, seed, partition, clients=6):
    config = Config(
        validation=share, seed=seed, partition=partition, clients=clients, cohort=2, model="mlp", device="cpu"
    )
    return build(config, data=blobs(n=200))


@settings(max_examples=25, deadline=None)
@given(
    share=st.floats(0.02, 0.6),
    seed=st.integers(0, 1000),
    partition=st.sampled_from(["dirichlet", "iid", "shards", "quantity"]),
)
def test_held_out_samples_are_training_samples_that_no_client_holds(share, seed, partition):
    setting = dealt(share, seed, partition)
    held, order = setting.held_out, setting.partition.order
    assert len(np.unique(held)) == len(held)
    assert not set(held.tolist()) & set(order.tolist())
    assert sorted([*held, *order]) == list(range(200))  # the training set, and nothing of the test set
    labels = setting.data.y_train
    for c in range(3):
        assert (labels[held] == c).sum() == round(share * (labels == c).sum())


@pytest.mark.parametrize("name", VARIANTS)
def test_no_method_gets_at_them(name):
    method = VARIANTS[name]
    setting = for_method(judged(reserve=method.reserve), method)
    order = setting.planner.partition.order
    assert not set(setting.held_out.tolist()) & set(order.tolist())
    assert not set(setting.held_out.tolist()) & set(setting.reserved_ids.tolist())


@pytest.mark.parametrize("name", ["feddpc", "moon", "faug", "feddyn clients", "fedexp pair"])
@pytest.mark.parametrize("engine", [Loop, Threads, Stacked, lambda: Cuda(anywhere=True)])
def test_every_engine_judges_the_model_that_the_test_set_judges(name, engine):
    """With the held-out samples as test set, both columns are the same."""
    method = VARIANTS[name]
    plain = judged(reserve=method.reserve)
    held, data = plain.held_out, plain.data
    same = dataclasses.replace(data, x_test=data.x_train[held], y_test=data.y_train[held])
    setting = judged(reserve=method.reserve, data=same)
    assert np.array_equal(setting.held_out, held)
    _, records = run_rounds(for_method(setting, method), method, engine(), 3)
    for record in records:
        for name in ("accuracy", "loss"):
            assert record.metrics[f"validation_{name}"] == pytest.approx(record.metrics[f"test_{name}"], abs=1e-9)


def test_the_curve_on_the_test_set_does_not_depend_on_being_judged():
    setting = judged()
    unjudged = dataclasses.replace(setting, validate=None)
    method = methods.create("feddpc")
    one, left = run_rounds(setting, method, Loop(), 3)
    two, right = run_rounds(unjudged, method, Loop(), 3)
    assert torch.equal(one.w, two.w)
    assert [r.metrics["test_loss"] for r in left] == [r.metrics["test_loss"] for r in right]
    assert not any(name in r.metrics for r in right for name in VALIDATION)


def test_records_and_summary_say_what_validation_chooses(tmp_path):
    outcome = execute(judged(), out=tmp_path / "r")
    rows = read_records(tmp_path / "r" / "rounds.jsonl")
    best = max(rows, key=lambda r: r["validation_accuracy"])
    assert outcome.summary["validation_accuracy"] == best["validation_accuracy"]
    assert outcome.summary["validation_round"] == best["round"]
    assert outcome.summary["validated_accuracy"] == best["test_accuracy"]
    assert all(row[name] is not None for row in rows for name in VALIDATION)


def test_without_validation_nothing_is_recorded(tmp_path):
    outcome = execute(judged(0.0), out=tmp_path / "r")
    assert not any(name in row for row in outcome.records for name in VALIDATION)
    assert "validation_accuracy" not in outcome.summary


def test_simulate_takes_it_too():
    result = simulate(rounds=2, clients=20, cohort=2, method="fedavg", engine="loop", validation=0.1)
    assert np.isfinite(result.curve("validation_accuracy")).all()


def test_large_images_are_scaled_batch_by_batch_with_the_same_result(monkeypatch):
    whole = judged()
    monkeypatch.setattr(type(whole.task), "resident_bytes", 0)
    pieces = judged()
    assert pieces.validate(pieces.w0) == pytest.approx(whole.validate(whole.w0), abs=1e-12)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_is_a_share(share):
    with pytest.raises(BadInputError, match="validation = "):
        Config(validation=share)


def test_too_much_and_too_little_are_said():
    data, nobody = blobs(), np.zeros(0, np.int64)
    with pytest.raises(BadInputError, match="less than one of any class"):
        held_out(0.001, data, nobody, 0)
    with pytest.raises(BadInputError, match="nothing would be left"):
        held_out(0.99, data, nobody, 0)
    with pytest.raises(BadInputError, match="take all samples of client"):
        judged(0.9)
