"""The bound on norms that is on by default, and nodes that are not asked after refusals in a row."""

import contextlib
import json
import random
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error
from flwr.app.message.message import make_message
from flwr.common.constant import ErrorCode

from feddpc import flower
from feddpc.errors import BadInputError
from feddpc.flower.exposition import Counts
from feddpc.runs.record import line
from federations import NODES, Unreliable, halves, move, plain_app, train, vector

QUIET = {"min_available_nodes": NODES, "fraction_evaluate": 0.0}
VICTIM, NODE = 2, 1002


def shifted(by):
    """Return a fault that moves the first array of a reply far away."""

    def fault(t, replies):
        record = next(iter(replies[0].content.array_records.values()))
        name = next(iter(record))
        record[name] = Array(record[name].numpy() + np.asarray(by, record[name].numpy().dtype))
        return replies

    return fault


def absent(t, replies):
    return []


def broken_app():
    """A client app all of whose replies hold NaN."""
    return plain_app(lambda t: np.nan)


class Evaluating(Unreliable):
    """Notes which nodes were asked to evaluate, one list per round."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.asked = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "evaluate":
            self.asked.append([message.metadata.dst_node_id for message in messages])
        return super().send_and_receive(messages, timeout=timeout)


class TestDefaultScreening:
    @pytest.mark.parametrize("name", ["FedDPC", "FedAvg"])
    def test_one_finite_reply_of_1e10_no_longer_wrecks_the_model(self, name):
        make = getattr(flower, name)
        screened, without = make(**QUIET), make(**QUIET)
        train(screened, Unreliable(plain_app(), victim=VICTIM, fault=shifted(1e10)), 2)
        train(without, Unreliable(plain_app(), victim=VICTIM, fault=absent), 2)
        assert torch.equal(vector(screened), vector(without))
        assert {(r.node, r.client) for r in screened.refusals} == {(NODE, VICTIM)}
        assert all("longer than usual" in r.reason for r in screened.refusals)

    @pytest.mark.parametrize("value", [5, 30.0, "strict"])
    def test_a_bound_that_is_no_table_is_named(self, value):
        with pytest.raises(BadInputError, match="screen"):
            flower.FedAvg(screen=value)

    def test_true_is_the_usual_one(self):
        assert flower.FedAvg(screen=True).policies == flower.FedAvg().policies

    def test_any_method_has_it_too(self):
        server, client = halves(cohort=NODES)
        del server["screen"]
        strategy = flower.strategy("scaffold", **server)
        train(strategy, Unreliable(flower.client_app(**client), victim=VICTIM, fault=shifted(1e6)), 2)
        assert {r.node for r in strategy.refusals} == {NODE}
        assert float(vector(strategy).abs().max()) < 1e3

    @pytest.mark.parametrize("off", [None, False, {}])
    def test_one_argument_switches_it_off(self, off):
        strategy = flower.FedAvg(**QUIET, screen=off)
        train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=shifted(1e10)), 1)
        assert float(vector(strategy).abs().max()) > 1e8
        server, _ = halves()
        assert flower.strategy("feddpc", **{**server, "screen": off}).policies.defense is None

    def test_honest_clients_do_not_meet_it(self):
        with_bound, without = flower.FedDPC(**QUIET), flower.FedDPC(**QUIET, screen=None)
        for strategy in (with_bound, without):
            train(strategy, Unreliable(plain_app()), 5)
        assert torch.equal(vector(with_bound), vector(without))
        assert with_bound.refusals == []

    def test_averaged_buffers_stay_possible(self):
        """A bound that somebody asks for judges what it does not see; the default one only judges less."""
        strategy = flower.FedAvg(**QUIET, buffer_names=["bias"])
        train(strategy, Unreliable(plain_app()), 1)
        assert strategy.records[0].participants == list(range(NODES))
        with pytest.raises(BadInputError, match="screen"):
            train(flower.FedAvg(**QUIET, buffer_names=["bias"], screen={"norm": 30}), Unreliable(plain_app()), 1)


def warming(t):
    """A rate that begins a thousand times smaller."""
    return 0.001 if t <= 15 else 1.0


class TestHonestClientsBeyondTheBound:
    """After a warm-up all updates are longer than any before them, and the default bound refuses them for a while."""

    def test_a_refusal_states_norm_median_and_bound(self):
        strategy = flower.FedAvg(**QUIET)
        train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=shifted(1e6)), 1)
        (refusal,) = strategy.refusals
        norm, bound, factor, median = map(float, re.findall(r"[\d.]+(?:e[+-]?\d+)?", refusal.reason)[:4])
        norms = [np.sqrt(sum((part**2).sum() for part in move(node, 1).values())) for node in range(NODES)]
        norms[VICTIM] = norm
        assert norm == pytest.approx(1e6 * 6**0.5, rel=1e-3)
        assert median == pytest.approx(sorted(norms)[(NODES - 1) // 2], rel=1e-3)
        assert factor == 30
        assert bound == pytest.approx(30 * median, rel=1e-3)

    def test_the_error_names_the_remedies(self, tmp_path):
        strategy = flower.FedAvg(**QUIET, folder=tmp_path / "run")
        with pytest.raises(flower.VoidRoundsError, match=r"median.*another folder.*screen=None") as error:
            train(strategy, Unreliable(plain_app(warming)), 30)
        assert "'norm':" in str(error.value)
        assert str(error.value).count("much longer than usual: delta has norm") == 3  # once per round
        with pytest.raises(flower.VoidRoundsError) as error:  # for another reason
            train(flower.FedAvg(**QUIET), Unreliable(broken_app()), 9)
        assert "screen" not in str(error.value)

    def test_the_bound_follows_after_half_a_window_also_over_restarts(self, tmp_path):
        """In 100 replies, 8 per round, the median is an old norm in 6 rounds; all nodes are asked meanwhile."""
        records = []
        for _ in range(3):
            strategy = flower.FedAvg(**QUIET, folder=tmp_path / "run")
            with contextlib.suppress(flower.VoidRoundsError):
                train(strategy, Unreliable(plain_app(warming)), 25)
            records += strategy.records
        assert [r.round for r in records] == list(range(1, 26))
        assert [r.round for r in records if not r.participants] == list(range(16, 22))
        assert all(len(r.participants) + len(r.rejected) == NODES for r in records)

    def test_a_shorter_window_follows_sooner(self):
        strategy = flower.FedAvg(**QUIET, screen={"norm": 30, "window": 20})
        train(strategy, Unreliable(plain_app(warming)), 18)
        assert [r.round for r in strategy.records if not r.participants] == [16]


class TestQuarantine:
    def run(self, fault, rounds=8, **more):
        wanted = {**QUIET, "quarantine": {"after": 2, "rounds": 3}, **more}
        strategy = flower.FedAvg(**wanted)
        train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=fault), rounds)
        return strategy

    def test_a_node_refused_in_a_row_is_not_asked_for_some_rounds(self, caplog):
        strategy = self.run(shifted(np.nan))
        refused = [r.round for r in strategy.refusals]
        assert refused == [1, 2, 6, 7]
        assert [r.federation.get("quarantined") for r in strategy.records[2:5]] == [[NODE]] * 3
        assert all(VICTIM not in r.participants for r in strategy.records)
        assert any(str(NODE) in message and "not finite" in message for message in caplog.messages)

    def test_screened_updates_count(self):
        assert [r.round for r in self.run(shifted(1e10)).refusals] == [1, 2, 6, 7]

    def test_one_good_reply_ends_the_row(self):
        def every_other(t, replies):
            return shifted(np.nan)(t, replies) if t % 2 else replies

        assert [r.round for r in self.run(every_other).refusals] == [1, 3, 5, 7]

    def test_a_robust_rule_that_prefers_others_is_no_fault(self):
        strategy = flower.FedAvg(**QUIET, rule="krum", quarantine={"after": 1, "rounds": 5})
        train(strategy, Unreliable(plain_app()), 4)
        assert all(len(r.participants) + len(r.rejected) == NODES for r in strategy.records)
        assert not strategy.quarantine.until

    @pytest.mark.parametrize("code", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE])
    def test_a_node_that_cannot_be_reached_is_asked_again_at_once(self, code):
        def unreachable(t, replies):
            error = make_message(metadata=replies[0].metadata, error=Error(code, "gone"))
            return [error] if t < 5 else replies

        strategy = self.run(unreachable)
        assert [VICTIM in r.participants for r in strategy.records] == [False] * 4 + [True] * 4

    def test_what_is_needed_for_a_round_to_count_is_never_quarantined(self):
        for more in ({"min_replies": NODES - 1, "max_void_rounds": 99}, {"min_train_nodes": NODES - 1}):
            strategy = flower.FedAvg(**QUIET, quarantine={"after": 1, "rounds": 50}, **more)

            class TwoBad(Unreliable):
                def deliver(self, message):
                    bad = message.metadata.dst_node_id in (1002, 1003)
                    replies = super().deliver(message)
                    return shifted(np.nan)(0, replies) if bad else replies

            train(strategy, TwoBad(plain_app()), 4)
            asked = [len(r.participants) + len(r.rejected) + len(r.dropped) for r in strategy.records]
            assert asked[1:] == [NODES - 1] * 3

    def test_it_survives_a_restart(self, tmp_path):
        for rounds in (2, 3, 8):
            strategy = self.run(shifted(np.nan), rounds, folder=tmp_path / "run")
            assert all(r.round not in (3, 4, 5) for r in strategy.refusals)
        listed = [json.loads(text)["round"] for text in (tmp_path / "run" / "refused.jsonl").read_text().splitlines()]
        assert listed == [1, 2, 6, 7]
        records = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
        assert [r.get("quarantined") for r in records] == [None, None, [NODE], [NODE], [NODE], None, None, [NODE]]

    def test_any_method(self):
        server, client = halves(cohort=NODES)
        strategy = flower.strategy("feddpc", **{**server, "quarantine": {"after": 2, "rounds": 3}})
        train(strategy, Unreliable(flower.client_app(**client), victim=VICTIM, fault=shifted(np.nan)), 6)
        assert [r.round for r in strategy.refusals] == [1, 2, 6]
        assert strategy.records[3].federation["quarantined"] == [NODE]
        assert strategy.records[3].dropped == []  # it was not asked

    def test_a_node_that_is_not_asked_is_no_missing_reply(self):
        server, client = halves(cohort=NODES)
        strategy = flower.strategy("feddpc", **{**server, "quarantine": {"after": 2, "rounds": 3}})
        train(strategy, Unreliable(flower.client_app(**client), victim=VICTIM, fault=shifted(np.nan)), 6)
        counts = Counts()
        for record in strategy.records:
            counts.add_record(json.loads(line(record)))
        assert counts.missing == 0

    @pytest.mark.parametrize("share", [1.0, 0.5])
    def test_it_is_not_asked_to_evaluate_either(self, share):
        """Round 1 and 2 are refused, the quarantine is of rounds 3 to 5; its metrics would count in the means."""
        server, client = halves(cohort=NODES)
        any_method = flower.strategy(
            "feddpc", **{**server, "quarantine": {"after": 2, "rounds": 3}, "fraction_evaluate": share}
        )
        wanted = {**QUIET, "quarantine": {"after": 2, "rounds": 3}, "fraction_evaluate": share}
        for strategy, app in ((any_method, flower.client_app(**client)), (flower.FedAvg(**wanted), plain_app())):
            grid = Evaluating(app, victim=VICTIM, fault=shifted(np.nan))
            train(strategy, grid, 6)
            assert [NODE in nodes for nodes in grid.asked[1:5]] == [False] * 4
            assert share < 1 or [NODE in grid.asked[0], NODE in grid.asked[5]] == [True, True]
            assert [len(nodes) for nodes in grid.asked] == [int(share * NODES)] * 6 or share == 1.0

    def test_evaluations_draw_the_nodes_that_flower_draws(self):
        from flwr.serverapp.strategy import FedAvg

        drawn = []
        for strategy in (FedAvg(fraction_evaluate=0.5), flower.FedAvg(fraction_evaluate=0.5)):
            grid = Evaluating(plain_app())
            random.seed(3)
            train(strategy, grid)
            drawn.append(grid.asked)
        assert drawn[0] == drawn[1]
        assert [len(nodes) for nodes in drawn[0]] == [NODES // 2] * 3

    def test_if_all_others_have_left_nobody_evaluates(self):
        grid = Evaluating(plain_app(), victim=VICTIM, fault=shifted(np.nan))
        strategy = flower.FedAvg(min_train_nodes=1, min_available_nodes=1, quarantine={"after": 1, "rounds": 9})
        train(strategy, grid, 1)
        grid.contexts = {NODE: grid.contexts[NODE]}
        strategy.min_evaluate_nodes = 1
        assert list(strategy.configure_evaluate(1, strategy.arrays(), ConfigRecord(), grid)) == []

    def test_a_client_beyond_the_population_is_not_at_fault(self):
        strategy = flower.FedAvg(**{**QUIET, "population": NODES - 2})
        train(strategy, Unreliable(plain_app()), 4)
        assert {refusal.faulty for refusal in strategy.refusals} == {False}
        assert all("quarantined" not in record.federation for record in strategy.records)

    def test_off_and_mistakes(self):
        assert [r.round for r in self.run(shifted(np.nan), quarantine=None).refusals] == list(range(1, 9))
        for bad in ({"after": 0}, {"until": 3}, 5):
            with pytest.raises(BadInputError, match="quarantine"):
                flower.FedAvg(quarantine=bad)
