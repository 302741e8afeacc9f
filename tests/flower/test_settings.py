"""Settings of a strategy that contradict each other, or that nothing in a federation reads, are refused."""

import pytest

from feddpc import flower, methods
from feddpc.errors import BadInputError
from feddpc.flower import InProcessGrid, client
from feddpc.flower.server import from_run_config
from federations import NODES, halves, train
from support import blobs

OWN = {"data": lambda number, clients: (blobs().x_train[number : number + 6], blobs().y_train[number : number + 6])}


@pytest.fixture
def server():
    return halves()[0]


def test_two_rates_are_refused_as_in_the_simulator(server):
    server.pop("lr")
    with pytest.raises(BadInputError, match=r"lr = 0\.5.*client_lr = 0\.1"):
        flower.strategy(**server, lr=0.5, client_lr=0.1)
    assert flower.strategy(**server, client_lr=0.3).config.lr == 0.3


def test_the_rate_of_the_apps_configuration_counts():
    assert from_run_config({"client-lr": 0.5}) == {"lr": 0.5} == from_run_config({"lr": 0.5})
    with pytest.raises(BadInputError, match="lr"):
        from_run_config({"client-lr": 0.5, "lr": 0.1})


def test_hyper_parameters_beside_a_method_object_are_refused(server):
    with pytest.raises(BadInputError, match="hyper"):
        flower.strategy(methods.create("feddpc", lam=1.0), **server, hyper={"lam": 9.0})


def test_a_class_is_a_method_as_in_the_simulator(server):
    kind = type(methods.create("fedprox"))
    assert flower.strategy(kind, **server).method == kind()


@pytest.mark.parametrize(("key", "value"), [("wait", -1.0), ("wait", "soon"), ("min_available_nodes", -1)])
def test_waiting_times_and_counts_are_checked(server, key, value):
    with pytest.raises(BadInputError, match=key):
        flower.strategy(**server | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha", 9.0),
        ("partition", "iid"),
        ("partition_options", {"alpha": 0.1}),
        ("data", "cifar10"),
        ("data_options", {"target": "price"}),
        ("client_test", 0.5),
        ("engine", "threads"),
        ("threads", 2),
        ("compile", True),
        ("client_memory", "disk"),
        ("model_options", {"hidden": 3}),
    ],
)
def test_what_nodes_decide_is_refused_by_a_strategy(server, key, value):
    with pytest.raises(BadInputError, match=key):
        flower.strategy(**server | {key: value})


def test_what_nodes_decide_may_be_a_key_of_the_app():
    """Its ``data`` function may well read ``alpha`` from the configuration."""
    assert from_run_config({"alpha": 0.1, "data": "mine.csv", "threads": 2, "partition.k": 3, "cohort": 3}) == {
        "cohort": 3
    }


def test_a_process_builds_each_of_its_nodes_once(monkeypatch):
    """However many there are: a store of fixed size was emptied by every round that visits more."""
    built = []
    build = client.build_node
    monkeypatch.setattr(client, "build_node", lambda *given: built.append(given[2]) or build(*given))
    server, app = halves()
    train(flower.strategy("feddpc", **server | {"clients": 20}), InProcessGrid(flower.client_app(**app | OWN), 20), 3)
    assert sorted(built) == list(range(20))


def test_the_store_of_nodes_is_bounded_by_their_size(monkeypatch):
    server, app = halves()
    grid = InProcessGrid(flower.client_app(**app), NODES)
    built = []
    build = client.build_node
    monkeypatch.setattr(client, "build_node", lambda *given: built.append(build(*given)) or built[-1])
    monkeypatch.setattr(client, "KEPT", 0)
    train(flower.strategy("feddpc", **server), grid, 1)
    assert len(built) > NODES  # only the last one was kept
    samples, d = built[0].world.data.x_train, sum(p.nbytes for p in built[0].task.module.parameters())
    assert built[0].size >= samples.nbytes + d
