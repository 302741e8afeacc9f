"""Another model, method or version, a node without data, no Flower: said clearly, and where it can be, survived."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from feddpc import flower, methods
from feddpc.errors import BadInputError
from feddpc.flower import VoidRoundsError, check_flwr
from feddpc.flower.messages import pack
from federations import NODES, Unreliable, forged, halves, train, vector

WRONG = 3


def federation(wrong_client=None, *, contexts=None, method="feddpc", fewer=1, **more):
    """Run a federation in which node ``WRONG`` is otherwise; return its strategy."""
    server, client = halves(cohort=NODES)
    apps = [flower.client_app(**client) for _ in range(NODES)]
    if wrong_client is not None:
        apps[WRONG] = flower.client_app(**{**client, **wrong_client})
    grid = Unreliable(apps)
    if contexts is not None:
        contexts(grid.contexts[1000 + WRONG].node_config)
    strategy = flower.strategy(method, **server, min_available_nodes=NODES - fewer, **more)
    train(strategy, grid, 2)
    return strategy


def refused(strategy, *words):
    """Assert that one node was refused, with these words in the reason, and that the others went on."""
    (refusal,) = strategy.refusals
    assert refusal.node == 1000 + WRONG
    for word in words:
        assert word in refusal.reason
    assert [len(r.participants) for r in strategy.records] == [NODES - 1] * 2
    assert all(r.dropped == [WRONG] for r in strategy.records)


def test_a_node_with_another_model_is_refused():
    refused(federation({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}), "same model", "111 parameters")


def test_a_node_that_was_set_up_for_another_method_is_refused():
    refused(federation({"method": methods.create("fedavg")}), "set up for fedavg", "same method")


def test_a_node_with_other_hyper_parameters_is_refused():
    refused(federation({"method": methods.create("feddpc", lam=2)}), '"lam": 2.0')


def test_a_node_of_another_version_is_refused():
    """The node finds a message of another version; that is the same the other way round."""
    server, client = halves(cohort=NODES)
    strategy = flower.strategy("feddpc", **server)
    strategy.nodes.spec = dataclasses.replace(strategy.nodes.spec, version="0.0.1")
    with pytest.raises(
        BadInputError, match=r"the server states the version '0\.0\.1', without a protocol.* upgrade the server"
    ):
        train(strategy, Unreliable(flower.client_app(**client)))


def test_a_method_that_a_node_does_not_know_is_refused_and_no_file_is_loaded(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("raise SystemExit('loaded')\n")
    server, client = halves()
    strategy = flower.strategy("feddpc", **server)
    strategy.nodes.spec = forged(strategy.nodes.spec, method=f"{path}:Own")
    with pytest.raises(BadInputError, match="knows no method"):
        train(strategy, Unreliable(flower.client_app(**client)))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"epochs": 10**9}, "epochs = 1000000000"),
        ({"epochs": 0}, "epochs = 0"),
        ({"classes": 10**12}, "classes = 1000000000000"),
        ({"classes": -1}, "classes = -1"),
        ({"batch_size": "many"}, "batch_size"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"seed": 1.5}, "seed"),
        ({"precision": "float8"}, "precision"),
        ({"hyper": [1]}, "hyper"),
        ({"rounds": 3}, "rounds"),
        ({"settings": "{"}, "settings"),
        ({"settings": "[1]"}, "settings"),
    ],
)
def test_orders_that_make_no_sense_are_refused(order, reason):
    """A server cannot keep a node busy for ever, let it use all its memory, or trip it up."""
    server, client = halves()
    strategy = flower.strategy("feddpc", **server)
    strategy.nodes.spec = forged(strategy.nodes.spec, **order)
    with pytest.raises(BadInputError, match=re.escape(reason)):
        train(strategy, Unreliable(flower.client_app(**client)))


@pytest.mark.parametrize("count", [10**12, -1, 3])
def test_a_payload_that_makes_no_sense_is_refused(count):
    """It says for how many samples a node must have room."""
    server, client = halves(reserve=0.1)

    class Sends(Unreliable):
        def deliver(self, message):
            if message.metadata.message_type == "query.setup":
                message.content["given"]["reserve.samples"] = pack({"n": torch.tensor(count)})["n"]
            return super().deliver(message)

    strategy = flower.strategy(methods.create("datasharing", beta=0.1), **server)
    with pytest.raises(VoidRoundsError):
        train(strategy, Sends(flower.client_app(**client)), 3)
    assert all("samples = " in refusal.reason for refusal in strategy.refusals if "samples" in refusal.reason)
    assert any(f"samples = {count}" in refusal.reason for refusal in strategy.refusals)


def test_a_message_that_does_not_fit_is_answered_and_not_worked_on():
    """A model of another size, a broadcast of another shape, fields that are missing: the node says what is wrong."""
    server, client = halves(cohort=NODES)

    class Sends(Unreliable):
        def deliver(self, message):
            if message.metadata.message_type == "train" and message.metadata.dst_node_id < 1003:
                content = message.content
                changes = {
                    1000: ("arrays", pack({"w": torch.zeros(2, dtype=torch.float64)})),
                    1001: ("round", ConfigRecord({"round": 1})),
                }
                changes[1002] = "down", pack({"c": torch.zeros(3, 5)})
                key, record = changes[message.metadata.dst_node_id]
                content[key] = record
            return super().deliver(message)

    strategy = flower.strategy("scaffold", **server)
    train(strategy, Sends(flower.client_app(**client)), 1)
    said = {refusal.client: refusal.reason for refusal in strategy.refusals}
    assert said.keys() == {0, 1, 2}
    assert "w has shape (2,)" in said[0]
    assert "lr = None" in said[1]
    assert "cannot do what it is asked for: RuntimeError" in said[2]
    assert strategy.records[0].participants == [3, 4, 5, 6, 7]


def test_a_node_without_a_partition_id_is_told_what_to_do():
    refused(federation(contexts=lambda c: c.pop("partition-id")), "--node-config", "partition-id=0")


def test_a_node_that_counts_other_clients_is_refused():
    refused(federation(contexts=lambda c: c.update({"num-partitions": 5})), "client 3 of 5", "8 clients")


def test_two_nodes_cannot_be_one_client():
    refused(federation(contexts=lambda c: c.update({"partition-id": 0})), "that is node 1000")


def test_a_node_without_samples_is_refused():
    empty = np.zeros((0, 6, 6, 1), np.uint8), np.zeros(0, np.int64)
    refused(federation({"data": lambda client, clients: empty}), "gave no samples")


def test_a_node_whose_data_cannot_be_read_is_refused():
    def missing(client, clients):
        raise FileNotFoundError("data/3.npz")

    refused(federation({"data": missing}), "FileNotFoundError", "data/3.npz")


def test_a_node_with_labels_nobody_knows_is_refused():
    odd = np.zeros((4, 6, 6, 1), np.uint8), np.array([0, 1, 2, 7])
    refused(federation({"data": lambda client, clients: odd}), "7", "3 classes")


def test_when_too_few_can_take_part_the_reasons_are_given_at_once():
    def missing(client, clients):
        raise FileNotFoundError("data/3.npz")

    with pytest.raises(BadInputError, match=r"7 of 8 clients can take part.*FileNotFoundError"):
        federation({"data": missing}, fewer=0)


def test_nodes_that_never_come_are_not_waited_for_for_ever():
    server, client = halves()
    strategy = flower.strategy("feddpc", **server, wait=0.05)
    grid = Unreliable(flower.client_app(**client))
    for node in list(grid.contexts)[3:]:
        del grid.contexts[node]
    with pytest.raises(BadInputError, match=r"3 of 8 clients.*no node: 3, 4, 5, 6, 7.*min_available_nodes"):
        train(strategy, grid)


def test_who_is_waited_for_is_said_once_with_the_remedy(caplog, monkeypatch):
    """A node that was revoked never comes again: without this line the log does not say what the server waits for."""
    monkeypatch.setattr("feddpc.flower.client_registry.PAUSE", 0.01)
    server, client = halves()
    grid = Unreliable(flower.client_app(**client))
    gone = grid.contexts.pop(1000 + WRONG)
    looks = []

    class Waits(type(grid)):
        def get_node_ids(self):
            looks.append(len(looks))
            if len(looks) == 20:
                self.contexts[1000 + WRONG] = gone
            return super().get_node_ids()

    grid.__class__ = Waits
    caplog.set_level("INFO", logger="flwr")
    train(flower.strategy("feddpc", **server), grid, 1)
    (said,) = [text for text in caplog.messages if "waiting for" in text]
    assert re.search(rf"7 of 8 clients.*no node: {WRONG}.*min_available_nodes", said)


def test_a_node_that_hangs_when_it_is_greeted_is_left_alone_from_then_on():
    server, client = halves(cohort=NODES)
    greeted = []

    class Mute(Unreliable):
        def deliver(self, message):
            if message.metadata.dst_node_id == 1000 + WRONG:
                greeted.append(message.metadata.message_type)
                return []
            return super().deliver(message)

    strategy = flower.strategy("feddpc", **server, min_available_nodes=NODES - 1)
    train(strategy, Mute(flower.client_app(**client)))
    assert greeted == ["query.hello"]
    assert [r.dropped for r in strategy.records] == [[WRONG]] * 3


def test_a_client_that_comes_later_takes_part_from_then_on():
    server, client = halves(cohort=NODES)
    grid = Unreliable(flower.client_app(**client))
    late = grid.contexts.pop(1000 + WRONG)
    strategy = flower.strategy("feddpc", **server, min_available_nodes=NODES - 1)

    class Comes(type(strategy)):
        def aggregate_train(self, server_round, replies):
            made = super().aggregate_train(server_round, replies)
            grid.contexts[1000 + WRONG] = late
            return made

    strategy.__class__ = Comes
    train(strategy, grid)
    assert [WRONG in r.participants for r in strategy.records] == [False, True, True]


def test_a_node_that_comes_back_under_another_id_is_the_same_client():
    server, client = halves(cohort=NODES)
    app = flower.client_app(**client)
    grid = Unreliable(app)
    strategy = flower.strategy("mifa", **server)

    class Reborn(type(strategy)):
        def aggregate_train(self, server_round, replies):
            made = super().aggregate_train(server_round, replies)
            if server_round == 1:
                context = grid.contexts.pop(1000 + WRONG)
                context.node_id = 7777
                grid.contexts[7777], grid.apps[7777] = context, app
            return made

    strategy.__class__ = Reborn
    train(strategy, grid)
    whole = flower.strategy("mifa", **server)
    train(whole, Unreliable(app))
    assert torch.equal(vector(strategy), vector(whole))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"method": "feddcp"}, "did you mean"),
        ({"cohrt": 3}, "cohort"),
        ({"test": None, "classes": None}, "classes"),
        ({"scaling": "channel", "scaler": None}, "channel"),
        ({"method": "datasharing", "reserve": None}, "the server has none"),
        ({"min_replies": 0}, "min_replies"),
    ],
)
def test_bad_settings_are_explained(values, reason):
    server, _ = halves()
    with pytest.raises(BadInputError, match=reason):
        flower.strategy(**{**server, **values})


def test_a_method_of_ones_own_that_learns_from_all_data_says_what_is_missing():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Curious(methods.Method):
        name = "curious"

        def learn(self, world):
            return {"mean": torch.tensor(world.data.x_train.mean())}

    server, client = halves()
    strategy = flower.strategy(Curious(), **server)
    with pytest.raises(BadInputError, match="learn_by_asking"):
        train(strategy, Unreliable(flower.client_app(**client, method=Curious())))


@pytest.mark.parametrize("version", ["1.40.0", "1.43.0", "2.0.0", "0.19.0"])
def test_an_unsupported_flower_is_refused_with_the_extra_to_install(version):
    with pytest.raises(BadInputError, match=r"pip install 'flwr>=1\.41,<1\.43'"):
        check_flwr(version)


def test_without_flower_the_extra_is_named_and_the_rest_works():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "def gone(name):\n"
        "    if name == 'flwr': raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = gone\n"
        "import feddpc, feddpc.flower\n"
        "from feddpc.errors import BadInputError\n"
        "try: feddpc.flower.FedDPC\n"
        "except BadInputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'flwr>=1.41,<1.43'" in done.stdout
