"""Data sharing: what is taken out of the training set, who gets it, and the model that is warmed up on it."""

import numpy as np
import pytest
import torch

from feddpc import compare, methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.method_changes import for_method
from feddpc.quadratic import trajectory
from feddpc.runs.provenance import privacy_note
from feddpc.tasks.base import BatchIndices
from support import Q4, run_rounds, setting_for, small_setting, uneven


def test_data_sharing_without_share_and_warm_up_is_fedavg():
    method = methods.create("datasharing", fraction=0.0, warmup=0)
    shared, _ = run_rounds(setting_for(method), method, Loop(), 4)
    plain, _ = run_rounds(small_setting(reserve=method.reserve), methods.create("fedavg"), Loop(), 4)
    assert torch.equal(shared.w, plain.w)


def test_the_shared_set_is_balanced_disjoint_and_never_of_the_test_set():
    method = methods.create("datasharing", beta=0.2, fraction=0.5)
    setting = setting_for(method, cohort=2)
    labels = setting.data.y_train
    G = setting.reserved_ids
    assert np.bincount(labels[G]).tolist() == [6, 6, 6]  # 0.2 * 90 / 3 of every class
    for before, after in zip(setting.partition, setting.planner.partition, strict=True):
        assert not set(before) & set(G)
        assert after[: len(before)].tolist() == before.tolist()
        assert set(after[len(before) :]) <= set(G)
        assert len(after) - len(before) == 9
    disclosed = privacy_note(setting, method)["disclosed"]
    assert disclosed == {"samples_at_the_server": 18, "samples_sent_to_each_client": 9}
    # Training sees x_train only: task.x is the training set, unchanged.
    assert setting.task.x.shape[0] == len(labels)


def test_the_warm_up_learns_the_shared_set():
    method = methods.create("datasharing", beta=0.2, warmup=20)
    cold, warm = small_setting(reserve=0.2), setting_for(method)
    rows = BatchIndices(torch.from_numpy(warm.reserved_ids))
    before, after = (float(s.task.loss(s.w0, s.task.fetch(rows))) for s in (cold, warm))
    assert after < 0.5 * before


def test_shares_differ_between_clients_and_are_a_function_of_the_seed():
    method = methods.create("datasharing", beta=0.3, fraction=0.4)

    def dealt(seed):
        config = Config(clients=10, cohort=2, seed=seed, device="cpu")
        return for_method(build(config, method=method), method).planner.partition

    one, two, other = dealt(0), dealt(0), dealt(1)
    assert one.order.tolist() == two.order.tolist()
    assert one.order.tolist() != other.order.tolist()
    shares = {tuple(mine[-10:]) for mine in one}
    assert len(shares) > 1


@pytest.mark.parametrize(
    ("reserve", "message"),
    [(0.001, "less than one of each"), (0.99, "nothing would be left"), (0.1, "raise reserve, or lower beta")],
)
def test_a_reserve_that_does_not_fit(reserve, message):
    method = methods.create("datasharing", beta=0.2)
    with pytest.raises(BadInputError, match=message):
        for_method(small_setting(reserve=reserve), method)


def test_a_given_partition_that_the_reserve_would_empty():
    with pytest.raises(BadInputError, match=r"take all samples of client 0"):
        small_setting(reserve=0.3)
    assert len(uneven(90)[0]) == 3


@pytest.mark.parametrize(
    ("hyper", "domain"),
    [
        ({"fraction": 1.5}, "0 <= fraction <= 1"),
        ({"beta": 0.0}, "0 < beta < 1"),
        ({"beta": 1.0}, "0 < beta < 1"),
        ({"warmup": -1}, "warmup >= 0"),
    ],
)
def test_domains(hyper, domain):
    with pytest.raises(BadInputError, match=f"datasharing: .* outside its domain: {domain}"):
        methods.create("datasharing", **hyper)


@pytest.mark.parametrize("name", ["datasharing", "moon", "fedalign", "fedbr", "gmm", "faug"])
def test_methods_that_need_samples_are_refused_on_quadratics(name):
    with pytest.raises(BadInputError, match=f"{name} needs a network and samples"):
        trajectory(methods.create(name), **Q4)


def test_a_comparison_keeps_the_same_samples_from_everybody():
    def reserves(names, **more):
        values = {"rounds": 1, "clients": 10, "cohort": 2, "model": "mlp", "engine": "loop", "device": "cpu", **more}
        return [run.config.reserve for run in compare(names, **values).results.values()]

    both = ["fedavg", methods.create("datasharing", beta=0.1, warmup=0)]
    assert reserves(both) == [0.1, 0.1]
    assert reserves(both[:1]) == [0.0]
    assert reserves(both, reserve=0.2) == [0.2, 0.2]
    with pytest.raises(BadInputError, match=r"datasharing needs 0\.1"):
        reserves(both, reserve=0.05)
