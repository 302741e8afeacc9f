"""Several runs at once: the numbers of each alone, and what happens when one fails."""

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch

from feddpc.errors import BadInputError
from feddpc.runs.concurrent import clone_for_thread, run_concurrently
from feddpc.study.compare import Overrides, compare
from support import DEVICE, small_setting

TIMES = ("seconds",)


def values(records):
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records]


def run(out, at_once, engine="stacked", rounds=4):
    wishes = Overrides({"data": "digits", "rounds": rounds, "clients": 20, "cohort": 4, "engine": engine, "threads": 1})
    return compare(wishes, ["fedavg", "feddpc", "fedvarp"], [0, 1], out, at_once=at_once)


def test_runs_at_once_have_the_numbers_of_runs_alone(tmp_path):
    alone, packed = run(tmp_path / "a", 1), run(tmp_path / "b", 3)
    assert [(o.config.method, o.config.seed) for o in packed] == [(o.config.method, o.config.seed) for o in alone]
    for one, other in zip(alone, packed, strict=True):
        assert torch.equal(one.w, other.w)
        assert values(one.records) == values(other.records)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
@pytest.mark.parametrize("streams", [False, True], ids=["stack", "streams"])
def test_graphs_at_once_keep_out_of_each_others_memory(tmp_path, streams, monkeypatch):
    monkeypatch.setattr("feddpc.engines.cuda.captured.LARGE_MODEL", 0 if streams else 1 << 60)
    alone, packed = run(tmp_path / "a", 1, "cuda", 60), run(tmp_path / "b", 6, "cuda", 60)
    for one, other in zip(alone, packed, strict=True):
        assert torch.equal(one.w, other.w)
        assert values(one.records) == values(other.records)


def test_they_do_run_at_once():
    meeting = threading.Barrier(3, timeout=10)
    assert run_concurrently([meeting.wait] * 3, at_once=3) is not None  # one at a time, they would wait for ever


def test_control_c_leaves_the_rest_undone():
    begun = []

    def job(i):
        begun.append(i)
        if i == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        run_concurrently([partial(job, i) for i in range(12)], at_once=2)
    assert len(begun) < 6


def test_with_an_older_torch_a_gpu_runs_one_at_a_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    with pytest.warns(UserWarning, match=r"torch 2\.10"):
        assert run_concurrently([threading.get_ident, threading.get_ident], 2) == [threading.get_ident()] * 2


def test_results_come_in_the_order_of_the_jobs():
    first = threading.Event()

    def late():
        first.wait(10)
        return "late"

    def early():
        first.set()
        return "early"

    assert run_concurrently([late, early], at_once=2) == ["late", "early"]


def test_a_failure_is_raised_and_nothing_more_is_begun():
    begun = []

    def job(i):
        begun.append(i)
        if i == 1:
            raise ValueError("this one")
        return i

    with pytest.raises(ValueError, match="this one"):
        run_concurrently(
            [lambda i=i: job(i) for i in range(2)] + [lambda i=i: job(i) for i in range(2, 200)], at_once=2
        )
    assert len(begun) < 200


def test_a_twin_shares_the_data_and_nothing_that_a_call_changes():
    setting = small_setting()
    other = clone_for_thread(setting)
    assert other.task.x.data_ptr() == setting.task.x.data_ptr()
    assert other.task.module is not setting.task.module
    assert other.population is not setting.population
    assert setting.w0.device.type == torch.device(DEVICE).type


def test_a_wish_to_stop_reaches_all(tmp_path):
    from feddpc.runs.stop import Stop

    class Sees:
        def __init__(self, stop):
            self.stop = stop

        def begin(self, config):
            pass

        def round(self, record):
            self.stop.wanted = True

        def end(self, summary):
            assert summary["status"] == "interrupted"

        def another(self):
            return self

    stop = Stop()
    wishes = Overrides({"data": "digits", "rounds": 50, "clients": 20, "cohort": 4, "engine": "stacked"})
    out = compare(wishes, ["fedavg", "feddpc"], [0, 1], tmp_path / "x", at_once=2, listener=Sees(stop), stop=stop)
    assert len(out) == 1


def test_at_once_must_be_a_number_of_runs(tmp_path):
    with pytest.raises(BadInputError, match="at_once"):
        run(tmp_path / "x", 0)
