"""Apps for a model and data of one's own, and how Flower's configuration reaches them."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import feddpc
from feddpc import flower, methods
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from federations import NODES, Unreliable, halves, train, vector
from support import blobs, tiny_net, uneven

DATA, DEALT = blobs(), uneven(90)


def mine(client, clients):
    """The samples of one client, from wherever a node keeps them."""
    assert clients == len(DEALT)
    return DATA.x_train[DEALT[client]], DATA.y_train[DEALT[client]]


def run_server(app, grid, **run_config):
    app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config))


def test_ones_own_model_and_data_train_as_in_the_simulator():
    """Nothing is resolved beforehand: batch size, scaling and server rate follow from what the clients say."""
    ends = []
    server = flower.server_app(
        "feddpc",
        model=tiny_net(),
        test=(DATA.x_test, DATA.y_test),
        clients=8,
        cohort=4,
        client_lr=0.05,
        rounds=3,
        on_result=lambda strategy, result: ends.append((vector(strategy), result)),
    )
    run_server(server, flower.InProcessGrid(flower.client_app(model=tiny_net, data=mine), NODES))
    (w, result), *_ = ends
    expected = feddpc.simulate(
        data=DATA, model=tiny_net(), method="feddpc", partition=DEALT, cohort=4, client_lr=0.05, rounds=3, engine="loop"
    )
    for name, value in expected.state_dict.items():
        assert torch.equal(torch.from_numpy(result.arrays[name].numpy()), value)
    assert w.dtype == torch.float32
    measured = [result.evaluate_metrics_serverapp[t]["accuracy"] for t in (1, 2, 3)]
    assert measured == expected.test_accuracy.tolist()


def test_the_configuration_of_the_app_comes_before_the_arguments():
    ends = []
    server, client = halves()
    run_config = {"rounds": 2, "method": "fedprox", "hyper.mu": 0.5, "client-lr": 0.01, "colour": "blue"}
    app = flower.server_app("feddpc", **server, on_result=lambda s, _: ends.append(s))
    run_server(app, Unreliable(flower.client_app(**client)), **run_config)
    (strategy,) = ends
    assert strategy.method == methods.create("fedprox", mu=0.5)
    assert (strategy.now.round, strategy.config.lr) == (2, 0.01)


def test_hyper_parameters_of_a_given_method_cannot_be_changed_from_outside():
    server, client = halves()
    app = flower.server_app(methods.create("feddpc"), **server)
    with pytest.raises(BadInputError, match="method given by name"):
        run_server(app, Unreliable(flower.client_app(**client)), **{"hyper.lam": 0.5})


def test_clients_evaluate_on_test_samples_of_their_own():
    server, client = halves()
    some = DATA.x_test[:10], DATA.y_test[:10]
    app = flower.client_app(**{**client, "data": lambda c, n: (*client["data"](c, n), *some)})
    strategy = flower.strategy("feddpc", **{**server, "test": some}, fraction_evaluate=1.0)
    result = train(strategy, Unreliable(app), 2)
    for t, record in enumerate(strategy.records, start=1):
        assert result.evaluate_metrics_clientapp[t]["accuracy"] == pytest.approx(record.metrics["test_accuracy"])
        assert result.evaluate_metrics_clientapp[t]["loss"] == pytest.approx(record.metrics["test_loss"])


def test_clients_without_test_samples_say_so():
    server, client = halves()
    strategy = flower.strategy("feddpc", **server, fraction_evaluate=1.0)
    result = train(strategy, Unreliable(flower.client_app(**client)), 1)
    assert result.evaluate_metrics_clientapp == {}
    assert {"no test samples" in r.reason for r in strategy.refusals} == {True}
    assert len(strategy.refusals) == NODES


def test_a_server_without_a_test_set_trains_all_the_same():
    server, client = halves()
    strategy = flower.strategy("feddpc", **{**server, "test": None})
    train(strategy, Unreliable(flower.client_app(**client)), 2)
    whole = flower.strategy("feddpc", **server)
    train(whole, Unreliable(flower.client_app(**client)), 2)
    assert torch.equal(vector(strategy), vector(whole))
    assert strategy.records[0].metrics == {"test_accuracy": None, "test_loss": None}


@pytest.mark.parametrize("method", ["fedavg", "gmm", "faug"])
def test_float_data_and_channel_scaling(method):
    """Samples that are no images; and a scaling that only who has all the data can know."""
    from dataclasses import replace

    from feddpc.build import build
    from feddpc.config import Config
    from feddpc.engines.loop import Loop
    from feddpc.method_changes import for_method
    from support import run_rounds

    rule = methods.create(method, **({"gan_steps": 3, "seeds": 1} if method == "faug" else {}))
    floats = replace(DATA, x_train=DATA.x_train / np.float32(255), x_test=DATA.x_test / np.float32(255))
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    for data, scaling in ((floats, "none"), (DATA, "channel")):
        values = {"clients": 8, "cohort": 4, "batch_size": 4, "precision": "float64", "scaling": scaling}
        setting = build(Config.read(values), data=data, module=net, partition=Partition(DEALT.order, DEALT.starts))
        progress, _ = run_rounds(for_method(setting, rule), rule, Loop(), 3)
        arguments = flower.app_arguments(setting)
        strategy = flower.strategy(rule, **arguments.server())
        train(strategy, Unreliable(flower.client_app(**arguments.client())), 3)
        assert torch.equal(vector(strategy), progress.w)
