"""What is compiled: the same numbers, for every method, and operations that keep the layout of their input."""

import dataclasses
import functools
import pickle
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._subclasses import fake_tensor
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from feddpc import methods
from feddpc.engines.cuda import compiling
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.methods import FedProx
from feddpc.methods.base import Method
from feddpc.models.flat import Flat
from feddpc.models.resnet import ResNet18
from feddpc.runs.concurrent import clone_for_thread
from support import HARD, VARIANTS, compare_with_loop, run_rounds, setting_for, small_setting

CompiledStack, CompiledStreams = (functools.partial(Cuda, compile=True, streams=s) for s in (False, True))
#: Every cohort has the same size, so that each step is traced for few shapes; `HARD` as it is has them of all sizes.
SAME_SIZE = {**HARD, "dropout": 0.0, "cohort": 2}
LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["apart", "together"])


@pytest.fixture(autouse=True)
def _no_stacks_are_noted(monkeypatch):
    """For error messages alone, tracing notes the whole stack at every operation, which takes half of its time here."""
    silent = SimpleNamespace(extract_stack=traceback.StackSummary, format_list=traceback.format_list)
    monkeypatch.setattr(fake_tensor, "traceback", silent)


@pytest.mark.parametrize("name", ["feddpc", "moon", "scaffold"])
@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
def test_a_traced_round_is_the_loops(name, engine, monkeypatch):
    """On a CPU what was traced, uncompiled; on a GPU compiled."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(compiling, "BACKEND", None)
    compare_with_loop(VARIANTS[name], engine(anywhere=True), HARD, rounds=3)


def test_new_shapes_are_compiled_once_each(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", None)
    calls = []

    def function(state, factor):
        calls.append(state["x"].shape)
        return {"y": state["x"] * factor, "n": 1}

    compiled = compiling.Compiled(function)
    for size in (2, 3, 2, 3):
        out = compiled({"x": torch.ones(size)}, 2.0)
        assert torch.equal(out["y"], torch.full((size,), 2.0))
    assert len(calls) == 2


def test_what_is_written_into_an_argument_is_there(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", None)
    y = torch.zeros(4)
    compiling.Compiled(lambda y, x: y[:2].copy_(x))(y, torch.ones(2))
    assert y.tolist() == [1, 1, 0, 0]


@pytest.fixture
def programs(monkeypatch):
    """What this process has compiled, empty at first."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(compiling, "BACKEND", None)
    monkeypatch.setattr(compiling, "_programs", OrderedDict())
    return compiling._programs


def test_what_is_closed_over_may_be_other_data(programs):
    """Two functions that compute the same share a program, each with its own data."""
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    x = torch.ones(2)
    assert compiling.Compiled(lambda x, _: x * one + 1)(x, torch.zeros(1)).tolist() == [2, 3]
    assert compiling.Compiled(lambda x: x * two + 1)(x).tolist() == [4, 6]
    assert len(programs) == 1
    assert compiling.Compiled(lambda x: x * two + 2)(x).tolist() == [5, 7]
    assert compiling.Compiled(lambda x: x * two + 1)(x.double()).tolist() == [4, 6]
    assert len(programs) == 3


def test_a_view_of_an_argument_stays_one(programs):
    """What a function closes over may be a part of what it changes."""
    y = torch.ones(4)
    part = y[:2]

    def function(y):
        y.add_(1)
        return part * 2

    compiled = compiling.Compiled(function)
    compiled(y)  # traced on it, which changes it too
    y.fill_(1)
    assert compiled(y).tolist() == [4, 4]
    assert not programs  # nobody else could use it


def test_old_programs_make_room(programs, monkeypatch):
    monkeypatch.setattr(compiling, "KEPT", 2)
    made = [compiling.Compiled(lambda x, n=n: x + n) for n in range(3)]
    for _ in range(2):
        assert [float(f(torch.zeros(()))) for f in made] == [0, 1, 2]
    assert len(programs) == 2


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
def test_runs_share_what_is_compiled(engine, programs):
    """Methods with the same local step, all rates, values of hyper-parameters and data; but not another local step."""

    def run(name, lr, seed=2, **hyper):
        method = methods.create(name, **hyper)
        compare_with_loop(
            method, engine(anywhere=True), {"lr": lr, "validation": 0.2, "seed": seed, "cohort": 1}, rounds=2
        )
        return len(programs)

    first = run("fedavg", 0.05)
    assert [run("feddpc", 0.1), run("fedvarp", 0.02, seed=5), run("fedexp", 0.05)] == [first] * 3
    with_a_term = run("fedprox", 0.05, mu=0.1)
    assert with_a_term > first
    assert run("fedprox", 0.02, mu=0.1) == with_a_term
    assert run("fedprox", 0.02, mu=0.2) == with_a_term
    assert [run("fedcm", 0.02, alpha=alpha) - with_a_term for alpha in (0.1, 0.5)] == [with_a_term - first] * 2


def test_functions_that_compute_the_same_share_a_trace(programs):
    traces, calls = {}, []

    def made(*keys):
        def function(hyper, x):
            calls.append(keys)
            return x * hyper["a"] if "b" not in hyper else x / hyper["a"]

        return compiling.Compiled(function, traces=traces)

    one, two, x = made(1), made(2), torch.ones(2)
    assert [f({"a": torch.tensor(a)}, x).tolist() for f, a in ((one, 2.0), (two, 3.0))] == [[2, 2], [3, 3]]
    assert calls == [(1,)]
    both = {"a": torch.tensor(2.0), "b": torch.tensor(0.0)}
    assert two(both, x).tolist() == [0.5, 0.5]  # other arguments
    assert two({"a": 4.0}, x).tolist() == [4, 4]
    assert two({"a": 5.0}, x).tolist() == [5, 5]  # a number is taken as it is
    assert two({"a": torch.tensor(2.0)}, torch.ones(3)).tolist() == [2, 2, 2]
    assert calls == [(1,), (2,), (2,), (2,), (2,)]


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
def test_runs_on_one_task_share_what_was_traced(engine, programs, monkeypatch):
    """And have the numbers of runs that share nothing."""
    made = []
    monkeypatch.setattr(compiling, "make_fx", lambda *args, **kwargs: made.append(1) or make_fx(*args, **kwargs))
    how = SAME_SIZE | {"validation": 0.2, "seed": 2, "cohort": 1}
    setting = small_setting(**how)

    def run(name, **hyper):
        before, method = len(made), methods.create(name, **hyper)
        shared, _ = run_rounds(clone_for_thread(setting), method, engine(anywhere=True), 2)
        count = len(made) - before
        if not count:
            alone, _ = run_rounds(small_setting(**how), method, engine(anywhere=True), 2)
            assert torch.equal(shared.w, alone.w)
        return count

    assert run("fedavg") > 0
    assert [run(name) for name in ("feddpc", "fedvarp")] == [0, 0]
    assert [run("fedprox", mu=mu) > 0 for mu in (0.1, 0.5)] == [True, False]
    assert run("fedcm", alpha=0.1) > 0
    assert [run("fedcm", alpha=alpha) for alpha in (0.3, 1.0)] == [0, 0]


@dataclass(frozen=True, kw_only=True)
class Halved(Method):
    """It uses what it made of its number."""

    mu: float = 0.1

    def correct(self, g, y, ctx):
        return g + self.half * y


@dataclass(frozen=True, kw_only=True)
class Derived(Halved):
    """That is there before a step is."""

    def __post_init__(self):
        object.__setattr__(self, "half", self.mu / 2)


class Cached(Halved):
    """That is made once."""

    @functools.cached_property
    def half(self):
        return self.mu / 2


@dataclass(frozen=True, kw_only=True)
class Asking(Method):
    """It looks at its number in ways that a tensor answers otherwise, or not at all."""

    name: ClassVar[str] = "asking"
    mu: float = 0.1

    def correct(self, g, y, ctx):
        weights = g.new_tensor([self.mu, 1 - self.mu])
        far = {0.1: 1.0, 0.5: 2.0}[self.mu] + (3.0 if self.mu in {0.5} else 0.0)
        return torch.clamp(g, -0.01, self.mu) * weights[0] + far * weights[1] * y


class Bare(Method):
    """It has no fields."""

    name: ClassVar[str] = "bare"

    def __init__(self, mu):
        object.__setattr__(self, "mu", mu)

    def correct(self, g, y, ctx):
        return g + self.mu * y


class Nearer(FedProx):
    """It changes one of ours."""

    name: ClassVar[str] = "nearer"

    def correct(self, g, y, ctx):
        return super().correct(g, y, ctx) * (2 if self.mu > 0.2 else 1)


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
@pytest.mark.parametrize("kind", [Derived, Cached, Asking, Bare, Nearer])
def test_somebody_elses_method_is_what_it_is(kind, engine, programs):
    """One value after the other on one task, on which ours would share what was traced."""
    setting = small_setting(**SAME_SIZE)
    for mu in (0.1, 0.5, 0.1):
        loop, _ = run_rounds(clone_for_thread(setting), kind(mu=mu), Loop(), 2)
        made, _ = run_rounds(clone_for_thread(setting), kind(mu=mu), engine(anywhere=True), 2)
        torch.testing.assert_close(made.w, loop.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("fedprox", "mu", (0.1, 0.0, 2.0)),
        ("fedcm", "alpha", (0.1, 1.0, 0.5)),
        ("feddyn", "alpha", (0.1, 0.5)),
        ("feddc", "alpha", (0.01, 0.5)),
        ("fedspeed", "rho", (0.1, 0.0, 0.3)),
        ("moon", "mu", (1.0, 0.0, 5.0)),
        ("moon", "tau", (0.5, 2.0)),
        ("fedbr", "mu", (0.5, 0.0)),
        ("fedalign", "mu", (0.1, 0.0, 0.2)),
    ],
)
def test_every_value_has_its_own_numbers(name, key, values, engine, programs):
    """On one task, whether a step can read them or is compiled for each."""
    setting = setting_for(methods.create(name), **SAME_SIZE)
    for value in values:
        method = methods.create(name, **{key: value})
        loop, _ = run_rounds(clone_for_thread(setting), method, Loop(), 2)
        made, _ = run_rounds(clone_for_thread(setting), method, engine(anywhere=True), 2)
        torch.testing.assert_close(made.w, loop.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
def test_every_optimizer_has_its_own_steps(engine, programs):
    """On one task, with a hyper-parameter that a compiled step reads."""
    setting = small_setting(lr_schedule="cosine", server_optimizer="adam")
    given = ({}, {"client_optimizer": "adamw"}, {"client_optimizer_options": {"momentum": 0.9}}, {"clip_norm": 0.5})
    for how in given:
        changed = dataclasses.replace(setting, config=dataclasses.replace(setting.config, **how))
        for mu in (0.1, 2.0):
            method = methods.create("fedprox", mu=mu)
            loop, _ = run_rounds(clone_for_thread(changed), method, Loop(), 2)
            made, _ = run_rounds(clone_for_thread(changed), method, engine(anywhere=True), 2)
            torch.testing.assert_close(made.w, loop.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", [CompiledStack, CompiledStreams])
def test_other_samples_are_traced_anew(engine, programs):
    """Where a task is changed after a run, or a copy of it."""
    method, setting = methods.create("fedavg"), small_setting(validation=0.2, seed=2, cohort=2)
    for change in range(3):
        if change == 1:
            setting.task.x = 255 - setting.task.x
        if change == 2:
            task = pickle.loads(pickle.dumps(setting.task))
            task.y = (task.y + 1) % 3
            setting = dataclasses.replace(setting, task=task)
        loop, _ = run_rounds(setting, method, Loop(), 2)
        made, _ = run_rounds(setting, method, engine(anywhere=True), 2)
        torch.testing.assert_close(made.w, loop.w, rtol=0, atol=1e-10)


def test_a_trace_that_fails_for_want_of_memory_is_tried_again(programs, monkeypatch):
    tries = []

    def full_at_first(*args, **kwargs):
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_fx(*args, **kwargs)

    monkeypatch.setattr(compiling, "make_fx", full_at_first)
    traces, calls = {}, []
    compiled = compiling.Compiled(lambda x: x + 1, lambda x: calls.append(1) or x + 1, traces=traces)
    with pytest.raises(torch.OutOfMemoryError):
        compiled(torch.ones(2))
    assert traces == {}
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert not calls


def test_what_cannot_be_traced_once_is_not_tried_twice(programs):
    """The other function takes its place, and is the run's own: it may have numbers of its own."""
    traces, calls = {}, []

    def made(number):
        def looking(x):
            calls.append(number)
            return x * number if x.sum() > 0 else x

        return compiling.Compiled(looking, lambda x: x * number, traces=traces)

    assert [made(n)(torch.ones(2)).tolist() for n in (2, 3)] == [[2, 2], [3, 3]]
    assert calls == [2]


@LAYOUTS
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_taken_apart(layout, affine):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(4, 6, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(6, generator=generator, dtype=torch.float64) if affine else None for _ in range(2))
    sizes = (4, 6, 15, 2)
    whole = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    laid = [t.contiguous(memory_format=layout) for t in (x, dy)]
    apart = compiling.group_norm(laid[0], weight, bias, *sizes, 1e-5)
    for a, b in zip(apart, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert apart[0].stride() == laid[0].stride()
    wanted = [True, affine, affine]
    whole = torch.ops.aten.native_group_norm_backward(dy, x, *whole[1:], weight, *sizes, wanted)
    apart = compiling.group_norm_backward(laid[1], laid[0], *apart[1:], weight, *sizes, wanted)
    for a, b in zip(apart, whole, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert apart[0].stride() == laid[0].stride()


def test_no_convolution_of_a_resnet_changes_the_layout():
    """Every input of every convolution, forward and backward, has the channels of a pixel together."""
    flat = Flat(ResNet18(10, size=32))
    flat.together = True
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    traced = make_fx(grad(lambda w: flat(w, x).square().sum()), decomposition_table=compiling.APART)(flat.vector())
    used = [node for node in traced.graph.nodes if "convolution" in str(node.target)]
    assert len(used) > 20
    for node in used:
        tensors = [a.meta["val"] for a in node.args[:3] if hasattr(a, "meta") and a.meta["val"].ndim == 4]
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
