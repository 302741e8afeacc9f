"""Batch plans: every sample once an epoch, partial batches kept, keyed by round and client alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc.data.batches import Planner
from feddpc.data.partition import Partition


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    batch_size=st.integers(1, 50),
    epochs=st.integers(1, 3),
    round=st.integers(1, 1000),
)
@settings(max_examples=80, deadline=None)
def test_every_sample_once_an_epoch(sizes, batch_size, epochs, round):
    partition = Partition.from_sizes(np.arange(sum(sizes)), np.array(sizes))
    plan = Planner(partition, batch_size, epochs, seed=3).plan(round, np.arange(len(sizes)))
    for i, size in enumerate(sizes):
        per_epoch = -(-size // batch_size)
        assert plan.steps[i] == epochs * per_epoch
        seen = [plan.index[i, k, : plan.count[i, k]] for k in range(plan.steps[i])]
        for e in range(epochs):
            epoch = np.concatenate(seen[e * per_epoch : (e + 1) * per_epoch])
            assert sorted(epoch) == sorted(partition[i])
        assert (plan.count[i, plan.steps[i] :] == 0).all()


def planner(**more):
    return Planner(Partition.from_sizes(np.arange(60), np.array([10, 20, 30])), 8, 1, seed=0, **more)


def test_a_client_gets_the_same_batches_in_any_company():
    alone = planner(shift=2).plan(4, np.array([1]))
    together = planner(shift=2).plan(4, np.array([0, 1, 2]))
    k, b = alone.index.shape[1:]
    assert np.array_equal(alone.index[0], together.index[1, :k, :b])
    assert np.array_equal(alone.draws[0], together.draws[1, :k, :b])
    assert alone.noise[0] == together.noise[1]


def test_rounds_and_clients_differ():
    first, second = (planner().plan(t, np.array([2])).index for t in (1, 2))
    assert not np.array_equal(first, second)


def test_draws_stay_in_range():
    draws = planner(shift=2).plan(1, np.arange(3)).draws
    assert draws[..., :2].min() == 0
    assert draws[..., :2].max() == 4
    assert set(np.unique(draws[..., 2])) == {0, 1}


def test_a_sweep_is_one_plain_pass():
    plan = planner(shift=2).sweep(np.array([0, 2]))
    assert plan.draws is None
    assert plan.index[1][plan.count[1][:, None] > np.arange(8)].tolist() == list(range(30, 60))
    assert plan.sizes.tolist() == [10, 30]


@pytest.mark.parametrize("clients", [[], [1]])
def test_few_clients(clients):
    assert len(planner().plan(1, np.array(clients, dtype=np.int64)).steps) == len(clients)
