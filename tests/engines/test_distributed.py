"""Several ranks compute what one process computes."""

from __future__ import annotations

import pytest
import torch

from feddpc.engines.distributed import Distributed
from feddpc.engines.loop import Loop
from feddpc.ranks import ALONE
from ranks_in_threads import on_ranks
from support import HARD, VARIANTS, enough_rounds, run_by_the_loop, run_rounds, setting_for

ALL = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())


def on(size, method, how, rounds, at_once=None):
    """Run a method on so many ranks; return state and records of each."""

    settings = [setting_for(method, **how) for _ in range(size)]  # not in the threads, which share torch's generator

    def work(ranks):
        return run_rounds(settings[ranks.rank], method, Distributed(Loop(), ranks, at_once), rounds)

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
