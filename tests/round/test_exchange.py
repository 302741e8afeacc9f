"""A cohort that does not fit into memory is trained in waves, with the same numbers."""

import warnings

import pytest
import torch

from feddpc import methods
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.cuda.training import Stack
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from support import VARIANTS, run_rounds, setting_for, small_setting


class Small:
    """Makes an engine fail as CUDA does when more than ``room`` clients come at once, after it has done some work."""

    def __init__(self, engine, room):
        self.engine, self.room, self.tried = engine, room, []
        plain = engine.train

        def train(method, task, w, down, own, plan, lr):
            self.tried.append(len(plan.clients))
            if len(plan.clients) > self.room:
                task.work.clients = len(plan.clients)
                task.work.add(gradients=1, passes=1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return plain(method, task, w, down, own, plan, lr)

        engine.train = train


@pytest.mark.parametrize("name", ["feddpc", "scaffold", "fedamd", "moon", "fedbr"])
@pytest.mark.parametrize("how", [{}, {"augment": True, "weighting": "samples"}], ids=["plain", "all"])
def test_waves_give_the_same_numbers(name, how):
    method = VARIANTS[name]
    setting = setting_for(method, **how)
    whole, left = run_rounds(setting, method, Stacked(), 4)
    engine = Stacked()
    small = Small(engine, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parts, right = run_rounds(setting, method, engine, 4)
    assert "with 4 clients at once: going on with 2 at a time, same numbers" in str(told[0].message)
    assert len(told) == 2
    torch.testing.assert_close(parts.w, whole.w, rtol=0, atol=1e-12)
    assert [r.train_loss for r in left] == pytest.approx([r.train_loss for r in right], abs=1e-12, nan_ok=True)
    assert small.tried[:3] == [4, 2, 1]  # found out once
    assert set(small.tried[3:]) == {1}
    assert engine.chunk == 1
    assert parts.meter == whole.meter  # what was done in vain does not count


def test_one_client_that_does_not_fit_is_an_error():
    engine = Loop()
    Small(engine, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BadInputError, match="does not suffice for one client: take a smaller batch_size or model"):
            run_rounds(small_setting(), methods.create("fedavg"), engine, 1)


@pytest.mark.parametrize("name", ["feddpc", "fedamd", "fedbr"])
@pytest.mark.parametrize("fails", ["capture", "warm"])
def test_a_second_attempt_to_capture_counts_nothing_twice(name, fails, monkeypatch):
    tries, plain = [], getattr(Stack, fails)

    def full_at_first(self):
        plain(self)
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Stack, fails, full_at_first)
    method, setting = VARIANTS[name], setting_for(VARIANTS[name])
    progress, _ = run_rounds(setting, method, Cuda(anywhere=True), 3)
    other, _ = run_rounds(setting, method, Loop(), 3)
    assert len(tries) == 2
    assert progress.meter == other.meter


def test_rounds_too_large_to_capture_go_on_uncaptured(monkeypatch):
    def full(self, *args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("feddpc.engines.cuda.session.Session._warm", full)
    method, setting, engine = methods.create("feddpc"), small_setting(), Cuda(anywhere=True)
    with pytest.warns(UserWarning, match="no device memory to capture rounds of 4 clients"):
        progress, _ = run_rounds(setting, method, engine, 3)
    other, _ = run_rounds(setting, method, Loop(), 3)
    torch.testing.assert_close(progress.w, other.w, rtol=0, atol=1e-10)
    assert engine.captures == 0
