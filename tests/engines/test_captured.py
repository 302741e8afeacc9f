"""Captured rounds without a GPU: the same buffers, orders and masks, with a graph that is just what it was made of."""

import dataclasses
import gc
import math
import weakref
from functools import partial

import pytest
import torch

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.cuda.buffers import row_classes
from feddpc.engines.cuda.captured import MOST_PROBES, MOST_SIZES, Cuda
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.kernels import group_norm
from feddpc.models import norm_fusion
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs import engine_choice
from feddpc.runs.engine_choice import choose_engine
from feddpc.runs.runner import execute
from feddpc.tasks import network
from support import DEVICE, HARD, VARIANTS, blobs, compare_with_loop, run_rounds, setting_for, small_setting, uneven

PLAIN = [name for name in VARIANTS if " " not in name]


STACK, STREAMS = (partial(Cuda, streams=streams) for streams in (False, True))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_captured_round_is_the_loops(name):
    compare_with_loop(VARIANTS[name], Cuda(anywhere=True), {})


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("engine", [STACK, STREAMS])
def test_with_decay_augmentation_weights_and_drop_out(name, engine):
    compare_with_loop(VARIANTS[name], engine(anywhere=True), HARD)


@pytest.mark.parametrize("name", ["feddpc", "fedexp pair"])
def test_samples_held_out_are_judged_within_the_round(name, monkeypatch):
    """The engine says how the model does on them; nobody evaluates it once more."""
    compare_with_loop(VARIANTS[name], Cuda(anywhere=True), {"validation": 0.2, "seed": 2})
    setting = setting_for(VARIANTS[name], validation=0.2, seed=2)
    monkeypatch.setattr(type(setting.task), "evaluate", None)
    _, records = run_rounds(setting, VARIANTS[name], Cuda(anywhere=True), 2)
    assert all(0 <= record.metrics["validation_accuracy"] <= 1 for record in records)
    assert records[0].metrics["validation_loss"] != records[0].metrics["test_loss"]


class OddNet(torch.nn.Module):
    """A network of somebody else's: three channels per group, a sum in place, one ReLU for two places."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = (torch.nn.Conv2d(c, 9, 3, padding=1) for c in (1, 9))
        self.norm, self.last = (torch.nn.GroupNorm(3, 9) for _ in range(2))
        self.relu, self.head = torch.nn.ReLU(), torch.nn.Linear(9, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        out = self.last(self.conv(x))
        out += x
        return self.head(self.relu(out).mean((2, 3)))


@pytest.mark.parametrize("engine", [STACK, STREAMS])
def test_norms_of_somebody_elses_network_are_fused(engine, monkeypatch):
    fused = []

    def noting(norm, x, residual=None, *, relu=False):
        fused.append((residual is not None, relu))
        return group_norm.normalized(norm, x, residual, relu=relu)

    monkeypatch.setattr(norm_fusion, "normalized", noting)
    for module in (network, group_norm):
        monkeypatch.setattr(module, "usable", lambda device: True)
    torch.manual_seed(0)
    config = Config(clients=8, cohort=4, batch_size=4, rounds=3, lr=0.05, device=DEVICE)
    setting = build(config, data=blobs(), module=OddNet(), partition=uneven(90))
    method = methods.create("feddpc")
    one, left = run_rounds(setting, method, Loop(), 3)
    assert not fused  # the reference takes the network as it is
    two, right = run_rounds(setting, method, engine(anywhere=True), 3)
    assert set(fused) == {(False, True), (True, True)}
    torch.testing.assert_close(two.w, one.w, rtol=0, atol=1e-4)
    for a, b in zip(left, right, strict=True):
        assert a.metrics == pytest.approx(b.metrics, abs=1e-3)


def test_nothing_is_captured_again():
    """All rounds of one cohort size use the graphs of the first, however many steps the clients make."""
    method, engine = methods.create("feddpc"), Cuda(anywhere=True)
    setting = small_setting()
    progress = RunState.begin(method, setting.w0, 8)
    run_round(setting, method, engine, progress)
    first = engine.captures
    assert first == 2 + len(row_classes(4, every=True))
    for _ in range(7):
        run_round(setting, method, engine, progress)
    assert engine.captures == first
    assert progress.w is next(iter(engine._sessions.values())).w  # the model stays where it is


def test_a_second_run_uses_the_graphs_of_the_first():
    method, engine, setting = methods.create("scaffold"), Cuda(anywhere=True), small_setting()
    one, _ = run_rounds(setting, method, engine, 3)
    kept, captured = one.w.clone(), engine.captures
    two, _ = run_rounds(setting, method, engine, 3)
    assert torch.equal(two.w, kept)
    assert engine.captures == captured


def test_cohorts_of_many_sizes_are_captured_up_to_a_limit():
    method, engine = methods.create("fedavg"), Cuda(anywhere=True)
    setting = small_setting(participation="bernoulli", cohort=4)
    a, left = run_rounds(setting, method, Loop(), 12)
    b, _ = run_rounds(setting, method, engine, 12)
    assert len({len(r.participants) for r in left}) > 3
    assert len(engine._sessions) <= MOST_SIZES
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["feddpc", "scaffold", "fedvarp"])
@pytest.mark.parametrize("engine", [STACK, STREAMS])
def test_a_bad_client_makes_the_round_void_and_is_then_screened(name, engine):
    """The round is repeated without graphs, with the same result as in the loop, and later rounds go on captured."""
    method, machine = methods.create(name), engine(anywhere=True)
    ends = []
    for runner in (Loop(), machine):
        setting = small_setting()
        setting.task.x = setting.task.x.to(torch.float64)
        sick = int(setting.planner.partition[4][0])
        setting.task.x[sick] = math.nan
        progress, records = run_rounds(setting, method, runner, 6)
        assert any(r.rejected == [4] for r in records)
        assert any(4 not in r.rejected for r in records)
        assert bool(progress.w.isfinite().all())
        ends.append(progress)
    torch.testing.assert_close(ends[0].w, ends[1].w, rtol=0, atol=1e-10)
    assert ends[0].meter == ends[1].meter
    assert machine.void == sum(4 in r.rejected for r in records)


@pytest.mark.parametrize("engine", [STACK, STREAMS])
@pytest.mark.parametrize("name", ["feddpc", "fedamd", "scaffold"])
def test_the_memory_of_a_run_is_free_at_once(name, engine):
    """Without the garbage collector, which comes when it likes; and the engine can be used again."""
    method, setting, machine = methods.create(name), small_setting(), engine(anywhere=True)
    was, _ = run_rounds(setting, method, machine, 3)
    kept = [*machine._sessions.values(), *machine._probes.values()]
    inside = [value for each in kept for value in vars(each).values() if isinstance(value, torch.Tensor)]
    parts = [weakref.ref(x) for x in (*kept, *inside, *(s.training for s in machine._sessions.values()))]
    del inside
    gc.disable()
    try:
        machine.release()
        kept.clear()
        left = [ref() for ref in parts if ref() is not None]
        assert all(x is was.w for x in left)  # the model itself, which is the run's
        del left
    finally:
        gc.enable()
    again, _ = run_rounds(setting, method, machine, 3)
    assert torch.equal(again.w, was.w)


def test_a_run_that_has_ended_keeps_no_graphs(monkeypatch):
    machine = Cuda(anywhere=True)
    monkeypatch.setitem(engine_choice.ENGINES, "cuda", lambda **_: machine)
    seen = []
    setting, method = small_setting(rounds=3, engine="cuda"), methods.create("feddpc")
    execute(setting, method=method, on_round=lambda _: seen.append(len(machine._sessions)))
    assert seen == [1, 1, 1]
    assert machine._sessions == {}


def test_a_device_that_failed_does_not_hide_why(monkeypatch, tmp_path):
    """What a run ended with is told, its folder is closed, and all graphs are forgotten."""
    machine, left = Cuda(anywhere=True), []
    monkeypatch.setitem(engine_choice.ENGINES, "cuda", lambda **_: machine)

    def broken(self):
        left.append(self)
        raise RuntimeError("CUDA error")

    def stop(record):
        raise KeyError("the disk")

    monkeypatch.setattr("feddpc.engines.cuda.session.Session.release", broken)
    setting, method = small_setting(rounds=3, engine="cuda"), methods.create("feddpc")
    with pytest.raises(KeyError, match="the disk"):
        execute(setting, method=method, out=tmp_path / "run", on_round=stop)
    assert len(left) == 1
    assert machine._sessions == {}
    monkeypatch.undo()
    monkeypatch.setitem(engine_choice.ENGINES, "cuda", lambda **_: machine)
    again = execute(setting, method=method, out=tmp_path / "run", resume=True)
    assert again.status == "finished"


def test_a_resumed_run_goes_on_captured(tmp_path, monkeypatch):
    """Bit for bit, with a checkpoint in between."""
    monkeypatch.setitem(engine_choice.ENGINES, "cuda", lambda **_: Cuda(anywhere=True))
    method = methods.create("feddc")
    whole = execute(small_setting(rounds=6, engine="cuda"), method=method, out=tmp_path / "a", checkpoint_seconds=0)
    execute(small_setting(rounds=3, engine="cuda"), method=method, out=tmp_path / "b", checkpoint_seconds=0)
    again = execute(
        small_setting(rounds=6, engine="cuda"), method=method, out=tmp_path / "b", resume=True, checkpoint_seconds=0
    )
    assert torch.equal(whole.w, again.w)


def test_without_evaluation():
    method, engine, setting = methods.create("fedavg"), Cuda(anywhere=True), small_setting()
    quiet = dataclasses.replace(setting, evaluates=False)
    progress, records = run_rounds(quiet, method, engine, 2)
    assert all(r.metrics["test_accuracy"] is None for r in records)
    other, _ = run_rounds(setting, method, Loop(), 2)
    torch.testing.assert_close(progress.w, other.w, rtol=0, atol=1e-10)


def test_graphs_are_refused_without_a_gpu_and_taken_by_auto_with_one():
    setting = small_setting()
    if DEVICE == "cpu":
        with pytest.raises(BadInputError, match="engine 'cuda' cannot be used: graphs need a GPU"):
            choose_engine("cuda", setting, methods.create("fedavg"))
    engine = choose_engine("auto", setting, methods.create("fedavg"))
    assert (engine.name == "cuda") == (DEVICE == "cuda")


def test_what_was_planned_ahead_is_what_would_be_planned_then():
    setting = small_setting(dropout=0.3)
    federation = setting
    federation.look_ahead(5)
    draw, plan = federation.draw(5), federation.plan(5, federation.draw(5).answered)
    fresh = federation.sampler.draw(5)
    assert draw.answered.tolist() == fresh.answered.tolist()
    assert plan.index.tolist() == federation.planner.plan(5, fresh.answered).index.tolist()
    some = fresh.answered[1:]  # after a client was rejected
    assert federation.plan(5, some).index.tolist() == federation.planner.plan(5, some).index.tolist()
    other = dataclasses.replace(federation, planner=dataclasses.replace(federation.planner, seed=9))
    assert other.plan(5, fresh.answered).index.tolist() != plan.index.tolist()  # nothing is carried over


@pytest.mark.parametrize("name", ["fedga fresh", "fedamd", "scaffold warm"])
def test_probes_are_captured_once_for_a_shape(name):
    """Later rounds ask from the graphs of the first ones, and shapes that come too late are asked without."""
    name = next(n for n in VARIANTS if all(word in n for word in name.split()))
    method, engine = VARIANTS[name], Cuda(anywhere=True)
    setting = setting_for(method)
    _, records = run_rounds(setting, method, engine, 12)
    assert 0 < len(engine._probes) <= MOST_PROBES
    captured = engine.captures
    _, repeated = run_rounds(setting, method, engine, 12)
    assert engine.captures == captured
    assert [r.metrics for r in repeated] == [r.metrics for r in records]


def test_probes_beyond_the_last_shape_are_asked_without_a_graph(monkeypatch):
    from feddpc.engines.cuda import captured

    monkeypatch.setattr(captured, "MOST_PROBES", 0)
    method = VARIANTS[next(n for n in VARIANTS if "fedga" in n and "fresh" in n)]
    engine = Cuda(anywhere=True)
    compare_with_loop(method, engine, {}, rounds=2)
    assert not engine._probes
