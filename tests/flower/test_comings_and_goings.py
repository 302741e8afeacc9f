"""Nodes that leave, restart, forget or come late, and what the records say of every reply."""

import json
import tomllib

import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from flwr.app.message.message import make_message

from feddpc import flower, methods
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import RETRY_AFTER
from feddpc.flower.screening import SHORT
from feddpc.flower.server import from_run_config
from federations import NODES, Unreliable, halves, plain_app, train, vector
from support import VARIANTS, small_setting

EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES, "fraction_evaluate": 0.0}


class Moody(Unreliable):
    """A grid on which ``lost(message)`` says what gets no answer, and ``before(t)`` is called before round ``t``."""

    def __init__(self, *args, lost=lambda message: False, before=lambda grid, t: None, **more):
        super().__init__(*args, **more)
        self.lost, self.before, self.kinds = lost, before, []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            self.kinds.append((message.metadata.message_type, message.metadata.dst_node_id))
        return super().send_and_receive(messages, timeout=timeout)

    def get_node_ids(self):
        self.before(self, sum(kind == "train" for kind, _ in self.kinds))
        return super().get_node_ids()

    def deliver(self, message):
        return [] if self.lost(message) else super().deliver(message)


def first(kind, node):
    """Lose the first message of a kind to a node."""
    seen = []

    def lost(message):
        hit = (message.metadata.message_type, message.metadata.dst_node_id) == (kind, node)
        seen.append(hit)
        return hit and seen.count(True) == 1

    return lost


def _trains(message, node):
    return (message.metadata.message_type, message.metadata.dst_node_id) == ("train", node)


def reserved(method, **how):
    arguments = flower.app_arguments(small_setting(reserve=method.reserve, cohort=NODES, **how))
    return arguments.server(), arguments.client()


class TestHandouts:
    """Clients that need something of the server before they can train."""

    @pytest.mark.parametrize(("name", "how"), [("datasharing", {}), ("fedbr", {}), ("fedavg", {"scaling": "channel"})])
    def test_a_client_that_missed_it_is_given_it_again(self, name, how):
        method = VARIANTS[name]
        server, client = reserved(method, **how)
        grid = Moody(flower.client_app(**client), lost=first("query.setup", 1002))
        strategy = flower.strategy(method, **server)
        train(strategy, grid, 2)
        assert [kind for kind, node in grid.kinds if node == 1002 and kind == "query.setup"] == ["query.setup"] * 2
        whole = flower.strategy(method, **server)
        train(whole, Unreliable(flower.client_app(**client)), 2)
        assert torch.equal(vector(strategy), vector(whole))

    def test_a_node_that_restarts_says_that_it_lost_it_and_gets_it_again(self):
        server, client = reserved(VARIANTS["fedavg"], scaling="channel")
        done = []

        def forget(grid, t):
            if t == 2 * NODES and not done:
                done.append(t)
                grid.contexts[1001].state = RecordDict()

        app = flower.client_app(**client)
        strategy = flower.strategy("fedavg", **server)
        train(strategy, Moody(app, before=forget), 4)
        (refusal,) = strategy.refusals
        assert (refusal.node, refusal.round) == (1001, 3)
        assert "does not have what the server hands out" in refusal.reason
        assert [1 in record.participants for record in strategy.records] == [True, True, False, True]


class TestEnrolment:
    def test_a_lost_greeting_is_repeated_after_a_while(self):
        server, client = halves(cohort=NODES)
        grid = Moody(flower.client_app(**client), lost=first("query.hello", 1002))
        strategy = flower.strategy("fedavg", **{**server, "min_available_nodes": NODES - 1})
        train(strategy, grid, RETRY_AFTER + 2)
        there = [2 in record.participants for record in strategy.records]
        assert not any(there[: RETRY_AFTER - 1])
        assert all(there[RETRY_AFTER:])

    def test_a_node_that_restarts_under_another_id_takes_its_place_when_the_old_one_is_gone(self):
        server, client = halves(cohort=NODES)

        def restart(grid, t):
            if t == NODES and 2002 not in grid.contexts:  # the old one still seems to be there
                grid.contexts[2002] = type(grid.contexts[1002])(
                    1, 2002, dict(grid.contexts[1002].node_config), RecordDict(), {}
                )
                grid.apps[2002] = grid.apps[1002]
            if t >= 2 * NODES:
                grid.contexts.pop(1002, None)

        strategy = flower.strategy("fedavg", **server)
        train(strategy, Moody(flower.client_app(**client), before=restart), 5)
        assert any("that is node 1002" in refusal.reason for refusal in strategy.refusals)
        assert all(2 in record.participants for record in strategy.records[3:])
        assert strategy.registry.nodes[2002] == 2

    def test_a_node_that_is_refused_is_not_taken_for_a_client(self):
        """Nodes that join in round 2 and claim to be a client that is there; their greetings name no client."""
        server, client = halves(cohort=NODES)

        def join(grid, t):
            if t == NODES:
                for node in (2002, 2003):
                    context = grid.contexts[1002]
                    grid.contexts[node] = type(context)(1, node, dict(context.node_config), RecordDict(), {})
                    grid.apps[node] = grid.apps[1002]

        strategy = flower.strategy("fedavg", **server)
        train(strategy, Moody(flower.client_app(**client), before=join, lost=lambda m: _trains(m, 1000)), 2)
        assert {refusal.client for refusal in strategy.refusals if refusal.node in (2002, 2003)} == {None}
        assert [(record.dropped, record.rejected) for record in strategy.records] == [([0], []), ([0], [])]

    def test_evaluation_goes_on_without_a_node_that_has_left(self):
        arguments = flower.app_arguments(small_setting(cohort=NODES))
        client = arguments.client()
        data = client["data"]
        with_test = {**client, "data": lambda c, n: (*data(c, n)[:2], *data(c, n)[:2])}

        def leave(grid, t):
            if t >= NODES:
                grid.contexts.pop(1003, None)

        strategy = flower.strategy("fedavg", **arguments.server(), fraction_evaluate=0.5)
        result = train(strategy, Moody(flower.client_app(**with_test), before=leave), 3, timeout=5)
        assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]


def test_the_batch_size_and_the_number_of_samples_are_those_of_the_beginning(tmp_path):
    server, client = halves(cohort=3)
    server["batch_size"] = None
    app = flower.client_app(**client)
    train(flower.strategy("scaffold", **server, folder=tmp_path / "cut"), Unreliable(app), 2)
    stored = tomllib.loads((tmp_path / "cut" / "config.toml").read_text())["batch_size"]
    fewer = Unreliable(app)
    for node in (1000, 1001, 1002, 1003, 1004):
        del fewer.contexts[node]
    again = flower.strategy("scaffold", **{**server, "min_available_nodes": 3}, folder=tmp_path / "cut")
    train(again, fewer, 3)
    whole = flower.strategy("scaffold", **server)
    train(whole, Unreliable(app), 1)
    assert again.config.batch_size == whole.config.batch_size == stored
    assert again.nodes.spec.tag == whole.nodes.spec.tag


def test_a_server_that_trains_first_uses_the_default_batch_size():
    """DataSharing's server warms the model up, in batches as large as those of the clients."""
    rule = methods.create("datasharing", warmup=1)
    server, client = reserved(rule)
    left_out = flower.strategy(rule, **{**server, "batch_size": None})
    train(left_out, Unreliable(flower.client_app(**client)), 1)
    given = flower.strategy(rule, **{**server, "batch_size": left_out.config.batch_size})
    train(given, Unreliable(flower.client_app(**client)), 1)
    assert torch.equal(vector(left_out), vector(given))


def test_a_drop_in_that_remembers_clients_says_so_when_all_ids_are_new(tmp_path):
    wanted = {**EVERYBODY, "population": NODES, "folder": tmp_path / "run"}
    train(flower.FedVARP(**wanted), Unreliable(plain_app()), 2)
    grid = Unreliable(plain_app())
    for old in list(grid.contexts):
        context = grid.contexts.pop(old)
        grid.contexts[old + 5000] = type(context)(1, old + 5000, context.node_config, context.state, {})
        grid.apps[old + 5000] = grid.apps.pop(old)
    with pytest.raises(BadInputError, match="--database"):
        train(flower.FedVARP(**wanted), grid, 4)


class TestRecords:
    def test_good_replies_of_a_round_without_a_quorum_are_named(self):
        strategy = flower.FedDPC(**EVERYBODY, min_replies=NODES)
        train(strategy, Unreliable(plain_app(), victim=2, fault=lambda t, replies: []), 1)
        (record,) = strategy.records
        assert (record.participants, record.dropped) == ([], [2])
        assert record.rejected == [c for c in range(NODES) if c != 2]
        assert all("fewer than" in refusal.reason for refusal in strategy.refusals)

    def test_refusals_of_greetings_and_evaluations_are_in_the_folder(self, tmp_path):
        server, client = halves(cohort=NODES)
        apps = [flower.client_app(**client) for _ in range(NODES)]
        apps[3] = flower.client_app(**{**client, "data": lambda c, n: ([], [])})
        strategy = flower.strategy(
            "fedavg",
            **{**server, "min_available_nodes": NODES - 1},
            fraction_evaluate=1.0,
            folder=tmp_path / "run",
        )
        train(strategy, Unreliable(apps), 2)
        listed = [json.loads(text) for text in (tmp_path / "run" / "refused.jsonl").read_text().splitlines()]
        assert [entry["reason"] for entry in listed] == [refusal.reason for refusal in strategy.refusals]
        assert sum("no samples" in entry["reason"] for entry in listed) == 1
        assert sum("no test samples" in entry["reason"] for entry in listed) == 2 * (NODES - 1)
        assert [record.notes["refused"] for record in strategy.records] == [1.0, NODES - 1]

    def test_what_a_node_says_is_cut(self, tmp_path):
        server, client = halves(cohort=NODES)
        strategy = flower.strategy("fedavg", **server, folder=tmp_path / "run")

        def shouting(t, replies):
            (reply,) = replies
            reply.content["reply"]["refused"] = "a\n" * 10**6
            return [reply]

        train(strategy, Unreliable(flower.client_app(**client), victim=1, fault=shouting), 1)
        (refusal,) = strategy.refusals
        assert len(refusal.reason) < 2 * SHORT
        assert "\n" not in refusal.reason

    @pytest.mark.parametrize("value", [[], float("nan"), [1.0, float("inf")]])
    def test_metrics_that_cannot_be_averaged_cost_no_round(self, value):
        def odd(t, replies):
            (reply,) = replies
            metrics = MetricRecord({**reply.content["metrics"], "loss": value})
            return [make_message(reply.metadata, RecordDict({**reply.content, "metrics": metrics}))]

        strategy = flower.FedDPC(**EVERYBODY)
        result = train(strategy, Unreliable(plain_app(), victim=2, fault=odd), 2)
        assert [len(record.participants) for record in strategy.records] == [NODES] * 2
        others = [(10 + node, node) for node in range(NODES) if node != 2]
        mean = sum(n * loss for n, loss in others) / sum(n for n, _ in others)
        assert result.train_metrics_clientapp[2]["loss"] == pytest.approx(mean)

    def test_one_strategy_may_be_started_twice(self, tmp_path):
        strategy = flower.FedDPC(**EVERYBODY, folder=tmp_path / "run")
        train(strategy, Unreliable(plain_app()), 2)
        train(strategy, Unreliable(plain_app()), 4)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["rounds"] == len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 4

    def test_ones_own_evaluation_stands_beside_the_servers(self):
        server, client = halves(cohort=NODES)
        strategy = flower.strategy("fedavg", **server)
        result = train(
            strategy,
            Unreliable(flower.client_app(**client)),
            2,
            evaluate_fn=lambda t, arrays: MetricRecord({"mine": float(t)}),
        )
        assert result.evaluate_metrics_serverapp[2]["mine"] == 2.0
        assert result.evaluate_metrics_serverapp[2]["accuracy"] == strategy.records[1].metrics["test_accuracy"]


def test_a_malformed_reply_does_not_end_a_run_with_faults():
    server, client = halves(cohort=NODES, faults={"sign_flip": 0.5})

    def short(t, replies):
        (reply,) = replies
        reply.content["up"] = type(reply.content["up"])({})
        return [reply]

    strategy = flower.strategy("fedavg", **server)
    train(strategy, Unreliable(flower.client_app(**client), victim=1, fault=short), 2)
    assert [1 in record.rejected for record in strategy.records] == [True, True]
    assert all(record.faults["sign_flip"] for record in strategy.records)


def test_a_quorum_would_break_the_promise_of_privacy():
    private = {"participation": "poisson", "privacy": {"clip": 0.1, "noise": 0.5, "delta": 0.01}}
    server, _ = halves(**private)
    with pytest.raises(BadInputError, match="min_replies = 6 cannot be run with privacy"):
        flower.strategy("fedavg", **server, min_replies=6)


def test_the_apps_configuration_reaches_every_argument_that_a_file_can_hold():
    told = {"fraction-evaluate": 0.5, "max-examples": 7, "reproducible": True, "samples": 9, "classes": 3, "model": "x"}
    assert from_run_config(told) == {
        **{"fraction_evaluate": 0.5, "max_examples": 7, "reproducible": True, "samples": 9, "classes": 3}
    }


def test_secure_aggregation_asks_nobody_to_evaluate():
    server, _ = halves()
    with pytest.raises(BadInputError, match="fraction_evaluate"):
        flower.secure_strategy(**{**server, "fraction_evaluate": 1.0})
