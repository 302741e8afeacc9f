"""Several ranks compute what one process computes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.distributed import Distributed, adds_up
from feddpc.engines.distributed.shares import MOVE, deal
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.methods import FedAvg, FedDPC
from feddpc.methods.base import Step
from feddpc.ranks import ALONE
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs.engine_choice import choose_engine
from ranks_in_threads import on_ranks
from support import HARD, VARIANTS, enough_rounds, run_by_the_loop, run_rounds, setting_for

ALL = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())


def on(size, method, how, rounds, at_once=None):
    """Run a method on so many ranks; return state and records of each."""

    each = [setting_for(method, **how) for _ in range(size)]  # not in the threads, which share torch's generator

    def work(ranks):
        return run_rounds(each[ranks.rank], method, Distributed(Loop(), ranks, at_once), rounds)

    if size == 1:
        return [work(ALONE)]
    return on_ranks(size, work)


def rows_of(states, name):
    """Return what is remembered of each client, on whichever rank."""
    found = {}
    for state in states:
        ids, table = getattr(state, name).export()
        for i, client in enumerate(ids.tolist()):
            assert client not in found, "two ranks remember the same client"
            found[client] = {key: rows[i] for key, rows in table.items()}
    return found


@ALL
@pytest.mark.parametrize(("size", "how"), [(1, {}), (2, HARD), (3, {})], ids=["one", "two", "three"])
def test_ranks_agree_with_loop(method, size, how):
    agree(method, size, how)


def agree(method, size, how, at_once=None):
    """Compare everything that some ranks compute with what one process computes."""
    rounds = enough_rounds(method)
    a, left = run_by_the_loop(method, how, rounds)
    results = on(size, method, how, rounds, at_once)
    b, right = results[0]
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    for key, value in a.server.items():
        torch.testing.assert_close(b.server[key], value, rtol=0, atol=1e-10)
    for one, other in zip(left, right, strict=True):
        assert (one.participants, one.dropped, one.rejected) == (other.participants, other.dropped, other.rejected)
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-10, nan_ok=True)
        assert one.metrics == pytest.approx(other.metrics, abs=1e-9)
        assert one.notes == pytest.approx(other.notes, abs=1e-8)
    for name in ("slots", "clients"):
        mine, theirs = rows_of([a], name), rows_of([state for state, _ in results], name)
        assert mine.keys() == theirs.keys()
        for client, memory in mine.items():
            for key, value in memory.items():
                torch.testing.assert_close(theirs[client][key], value, rtol=0, atol=1e-10)
    for state, records in results[1:]:
        assert torch.equal(state.w, b.w), "ranks have different models"
        assert [r.participants for r in records] == [r.participants for r in right]
    assert b.meter == a.meter


SOME = [
    "feddpc",
    "feddpc client",
    "feddpc exclude",
    "fedexp",
    "fedvarp",
    "scaffold",
    "scaffold warm",
    "fedamd",
    "fedga fresh",
]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("size", [1, 2])
def test_clients_whose_uploads_are_forgotten_one_by_one(name, size):
    agree(VARIANTS[name], size, {}, at_once=1)


@pytest.mark.parametrize("name", SOME)
def test_ranks_without_clients(name):
    """Five ranks for four clients, and rounds in which only one client answers."""
    agree(VARIANTS[name], 5, {"dropout": 0.5})


@pytest.mark.parametrize("name", ["feddpc", "scaffold", "fedavg"])
@pytest.mark.parametrize(
    "how",
    [
        {"faults": {"sign_flip": 0.2, "replayed": 0.2}, "rule": "median"},
        {"faults": {"nan": 0.3}},
        {"screen": {"norm": 1.5}},
        {"rule": "multi_krum", "rule_options": {"select": 2}},
    ],
    ids=["median", "nan", "screen", "krum"],
)
def test_rules_that_see_all_rows(name, how):
    agree(VARIANTS[name], 2, how)


@pytest.mark.parametrize("name", ["feddpc", "fedavg", "feddpc client"])
@pytest.mark.parametrize("at_once", [None, 1])
def test_privacy_adds_up_too(name, at_once):
    agree(VARIANTS[name], 3, {"participation": "poisson", "privacy": {"clip": 0.6, "noise": 0.8}}, at_once)


class Sick(FedDPC):
    """One client of thirteen samples sends what is not finite."""

    def finish(self, y, ctx):
        sent, memory = super().finish(y, ctx)
        ill = ctx.steps == 8
        return {key: torch.where(ill, torch.nan, x) for key, x in sent.items()}, memory


class Mean(FedAvg):
    """FedAvg whose server's half was written for one process: it says nothing about sums."""

    def combine(self, w, server, rows, cohort):
        return Step(rows["delta"].mean(0), rate=cohort.server_lr / cohort.client_lr)


class Wrong(Mean):
    """The same, with a promise that it does not keep."""

    needs_only_sums = True


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("how", [{}, {"weighting": "samples"}, {"cohort": 1}], ids=["uniform", "samples", "alone"])
def test_a_client_that_is_not_finite_loses_its_vote_only(at_once, how):
    agree(Sick(), 2, how, at_once)


def test_a_method_of_ones_own_needs_to_say_nothing():
    assert not adds_up(Mean())
    assert adds_up(Sick())
    assert not adds_up(FedDPC(guard="exclude"))
    agree(Mean(), 2, {})


def test_a_promise_that_is_not_kept_is_refused():
    with pytest.raises(BadInputError, match="needs_only_sums"):
        choose_engine("distributed", setting_for(Wrong()), Wrong())
    assert choose_engine("distributed", setting_for(Sick()), Sick()).name == "distributed"


@pytest.mark.parametrize("name", ["fedbn", "fedavg"])
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_statistics_and_clients_evaluations_agree(name, buffers):
    if (name, buffers) == ("fedbn", "average"):
        return
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    values = {"clients": 8, "cohort": 3, "batch_size": 8, "precision": "float64", "device": "cpu", "alpha": 0.5}
    values |= {"evaluate_clients": True, "finetune_steps": 2, "buffers": buffers, "validation": 0.1}
    method = methods.create(name)

    def world():
        return build(Config.read(values), module=copy.deepcopy(net))

    def run(setting, engine):
        state = RunState.of(setting, method)
        return state, [run_round(setting, method, engine, state) for _ in range(4)]

    each = [world() for _ in range(2)]
    a, left = run(world(), Loop())
    (b, right), _ = on_ranks(2, lambda ranks: run(each[ranks.rank], Distributed(Loop(), ranks)))
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    torch.testing.assert_close(b.statistics, a.statistics, rtol=0, atol=1e-10)
    for one, other in zip(left, right, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-9)
        assert one.client_metrics.keys() == other.client_metrics.keys()
        for key, found in one.client_metrics.items():
            assert found == pytest.approx(other.client_metrics[key], abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.data())
def test_shares(work, size, data):
    """Every client has one rank, nobody has more than the longest client above the mean, and homes are kept if free."""
    work = np.array(work, dtype=np.int64)
    home = None
    if data.draw(st.booleans()):
        home = np.array([data.draw(st.integers(-1, size - 1)) for _ in work], dtype=np.int64)
    shares = deal(work, size, home)
    assert sorted(np.concatenate(shares.places).tolist()) == list(range(len(work)))
    assert all((shares.rank_of[mine] == rank).all() for rank, mine in enumerate(shares.places))
    load = np.array([(work[mine] + 1).sum() for mine in shares.places])
    if len(work):
        assert load.max() <= (work + 1).sum() / size + work.max() + 1 + MOVE * len(work)
    if size == 1 and len(work):
        assert set(shares.rank_of.tolist()) == {0}


def test_memories_stay_at_home_where_that_costs_no_time():
    work = np.full(8, 5)
    home = np.array([0, 1, 0, 1, 1, 0, 1, 0])
    assert (deal(work, 2, home).rank_of == home).all()
    crowded = deal(work, 2, np.zeros(8, np.int64))
    assert crowded.counts == [4, 4]


@pytest.mark.parametrize(
    ("name", "vectors"), [("fedavg", 1), ("feddpc", 1), ("fedprox", 1), ("fedexp", 1), ("scaffold", 2), ("fedcm", 2)]
)
def test_a_round_sends_as_many_vectors_as_the_rule_adds_up(name, vectors):
    """And a few numbers per client, however many clients there are."""
    method = VARIANTS[name]
    sent = {}
    for cohort in (4, 8):
        each = [setting_for(method, cohort=cohort) for _ in range(2)]

        def work(ranks, each=each):
            run_rounds(each[ranks.rank], method, Distributed(Loop(), ranks), 2)
            return ranks.sent

        sent[cohort] = max(on_ranks(2, work)) / 2
    d = each[0].task.d
    assert vectors * d <= sent[4] <= vectors * d + 100
    assert sent[8] <= vectors * d + 150
