"""One battery for every registered method: what an engine, a checkpoint and a comparison rely on."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from feddpc import methods
from feddpc.config import write_toml
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.round.client_table import ClientTable
from feddpc.round.probes import probe_cohort
from feddpc.round.round import run_round
from feddpc.round.server_step import stacked
from feddpc.round.state import RunState
from feddpc.runs.record import line
from support import (
    HARD,
    SLOW_STARTERS,
    VARIANTS,
    enough_rounds,
    run_by_the_loop,
    run_rounds,
    same_memories,
    setting_for,
)

ALL = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())


@ALL
@pytest.mark.parametrize("engine", [Stacked(), Stacked(narrow=False)], ids=["narrow", "masked"])
@pytest.mark.parametrize("how", [{}, HARD], ids=["plain", "all"])
def test_engines_agree(method, engine, how):
    """float64, 1e-10: partial participation, client sizes from 1 to 13, 2 to 8 local steps, partial last batches."""
    setting = setting_for(method, **how)
    rounds = enough_rounds(method)
    a, left = run_by_the_loop(method, how, rounds)
    b, right = run_rounds(setting, method, engine, rounds)
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    assert float((a.w - setting.w0).norm()) > 1e-3
    for one, other in zip(left, right, strict=True):
        assert (one.participants, one.dropped, one.rejected) == (other.participants, other.dropped, other.rejected)
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-10, nan_ok=True)
        assert one.notes == pytest.approx(other.notes, abs=1e-8)
    same_memories(a, b)


@ALL
@pytest.mark.parametrize("engine", [Loop(), Stacked()], ids=["loop", "stacked"])
def test_two_runs_are_bit_identical(method, engine):
    """From the data on, and all of it: records, model, the server's state, memories, what was counted."""
    (a, left), (b, right) = (run_rounds(setting_for(method, precision="float32"), method, engine, 3) for _ in range(2))
    assert a.w.dtype == torch.float32
    assert [line(replace(r, seconds=0.0)) for r in left] == [line(replace(r, seconds=0.0)) for r in right]
    assert torch.equal(a.w, b.w)
    assert a.server.keys() == b.server.keys()
    assert all(torch.equal(a.server[k], b.server[k]) for k in a.server)
    same_memories(a, b, atol=0.0)
    assert a.meter == b.meter


@ALL
def test_nothing_handed_to_a_hook_is_changed(method):
    setting = setting_for(method)
    w0 = setting.w0.clone()
    progress, _ = run_rounds(setting, method, Loop(), enough_rounds(method) - 1)
    before = {k: v.clone() for k, v in progress.server.items()}, progress.w.clone()
    server = progress.server
    run_round(setting, method, Loop(), progress)
    assert torch.equal(setting.w0, w0)
    assert not torch.equal(progress.w, before[1])
    assert all(torch.equal(server[k], v) for k, v in before[0].items())


@ALL
def test_state_keeps_its_shape(method):
    """A checkpoint restores into a fresh state, so the state after any round must look like the first."""
    setting = setting_for(method)
    first = RunState.begin(method, setting.w0, len(setting.population))
    later, _ = run_rounds(setting, method, Loop(), 3)
    assert later.server.keys() == first.server.keys()
    for key, value in first.server.items():
        assert (later.server[key].shape, later.server[key].dtype) == (value.shape, value.dtype)
    idle = method.on_empty_round(later.server)
    assert {k: v.shape for k, v in idle.items()} == {k: v.shape for k, v in first.server.items()}


@ALL
def test_a_moved_state_goes_on_alike(method):
    """Exported and restored halfway, the next rounds are bit-identical."""
    setting, rounds = setting_for(method), enough_rounds(method)
    whole, _ = run_by_the_loop(method, {}, rounds)
    half, _ = run_rounds(setting, method, Loop(), rounds // 2)
    fresh = RunState.begin(method, setting.w0, len(setting.population))
    fresh.w, fresh.server, fresh.round = half.w, half.server, half.round
    fresh.slots.restore(*half.slots.export())
    fresh.clients.restore(*half.clients.export())
    while fresh.round < rounds:
        run_round(setting, method, Loop(), fresh)
    assert torch.equal(fresh.w, whole.w)


@ALL
def test_memories_exist_only_for_clients_that_came(method):
    setting = setting_for(method, cohort=1)
    progress, records = run_rounds(setting, method, Loop(), 2)
    seen = {c for r in records for c in r.participants}
    for memory in (progress.slots, progress.clients):
        assert isinstance(memory, ClientTable)
        surveyed = method.surveys and memory is progress.clients
        assert len(memory) == (len(setting.population) if surveyed else len(seen) if memory else 0)


@ALL
def test_who_needs_only_sums_cannot_tell_rows_from_their_mean(method):
    """And for every method, aggregate is combine after transform."""
    setting = setting_for(method)
    progress, _ = run_rounds(setting, method, Loop(), 3)
    w = progress.w
    ids = np.array([0, 1, 3, 4])
    plan, cohort = setting.cohort(method, 4, ids, progress.slots.read(ids))
    cohort = replace(cohort, steps=torch.full_like(cohort.steps, 3.0))
    probes = probe_cohort(setting, method, Loop(), progress, plan, cohort)[2]
    down = method.broadcast(w, progress.server, probes if method.reports else {}, cohort) | setting.one_time_payload
    own = progress.clients.read(plan.clients) | probes
    up = Loop().train(method, setting.task, w, down, own, plan, 0.05).uploads
    rows, notes = method.transform(progress.server, up, cohort)
    rows = {k: stacked(v) for k, v in rows.items()}
    if getattr(method, "guard", "") != "exclude":
        whole, parts = (f(w, progress.server, x, cohort) for f, x in ((method.aggregate, up), (method.combine, rows)))
        torch.testing.assert_close(whole.update, parts.update, rtol=0, atol=1e-12)
        assert whole.notes.keys() == {*parts.notes, *notes}
    if not method.needs_only_sums or getattr(method, "guard", "") == "exclude":
        return
    means = {k: v.mean(0, keepdim=True).expand_as(v) for k, v in rows.items()}
    one, other = (method.combine(w, progress.server, x, cohort) for x in (rows, means))
    torch.testing.assert_close(one.update, other.update, rtol=0, atol=1e-12)
    for key, value in one.server.items():
        torch.testing.assert_close(other.server[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "departure"), [("fedexp", "lr_decay"), ("fedga", "decay"), ("fedvarp", "tau"), ("fedamd", "sqrt(4 r^2")]
)
def test_known_departures_are_named(name, departure):
    """Differences from the authors' code that independent checks found."""
    text = methods.get(name).describe()
    assert departure in text[text.index("Departures:") : text.index("Confidence:")]


@pytest.mark.parametrize("name", methods.names())
def test_what_a_method_says_about_itself(name):
    cls = methods.get(name)
    text = cls.describe()
    assert cls.name == name
    assert cls.title
    assert cls.reference
    for word in ("Server", "Departures", "Confidence", ">>>"):
        assert word in text, f"{name}: the docstring lacks {word}"
    method = methods.create(name)
    for key in method.hyper():
        assert f"| {key} " in text, f"{name}: the docstring does not list {key}"
    stored = tomllib.loads(write_toml({"hyper": method.hyper()})).get("hyper", {})
    assert methods.create(name, **stored) == method


def test_the_learning_rates_are_used():
    """A guard against a method that ignores eta_g or eta_l."""
    for name, method in VARIANTS.items():
        ends = []
        for rates in (
            {"lr": 0.05, "server_lr": 0.05},
            {"lr": 0.05, "server_lr": 0.02},
            {"lr": 0.02, "server_lr": 0.02},
        ):
            setting = setting_for(method, **rates)
            ends.append(run_rounds(setting, method, Loop(), SLOW_STARTERS.get(name, 1))[0].w)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert not torch.allclose(ends[i], ends[j], atol=1e-7), name


def test_register_refuses_a_taken_name():
    from feddpc.errors import BadInputError

    class Other(methods.Method):
        name = "fedavg"

    with pytest.raises(BadInputError, match="taken by FedAvg"):
        methods.register(Other)

    class Nameless(methods.Method):
        pass

    with pytest.raises(BadInputError, match="has no name"):
        methods.register(Nameless)


def test_the_client_form_works_on_long_vectors_in_both_engines():
    """Beyond algebra.LONG numbers the sums take another way on a CPU, which vmap could not follow."""
    from torch import nn

    from feddpc.build import build
    from feddpc.config import Config
    from feddpc.methods._algebra import LONG
    from support import blobs, uneven

    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 14_000), nn.ReLU(), nn.Linear(14_000, 3))
    config = Config.read({"cohort": 2, "clients": 8, "batch_size": 32, "rounds": 2})
    setting = build(config, data=blobs(), module=module, partition=uneven(90))
    assert setting.task.d > LONG
    ends = [
        run_rounds(setting, methods.create("feddpc", form=form), engine, 2)[0].w
        for form, engine in (("client", Loop()), ("client", Stacked()), ("matrix", Loop()), ("streaming", Loop()))
    ]
    moved = float((ends[0] - setting.w0).norm())
    for end in ends[1:]:
        assert float((end - ends[0]).norm()) < 1e-5 * moved
