"""The fault table: one bad reply costs that client its vote, is written down with its node, and harms nothing else.

Every row is run twice, with an unchanged client app behind a drop-in strategy and with the whole protocol. "Unharmed"
means: bit by bit the model of a run in which that reply never came.
"""

import copy
import io
import json
import time

import numpy as np
import pytest
import torch
from flwr.app import Array, Error, MetricRecord
from flwr.app.message.message import make_message

from feddpc import flower
from federations import NODES, Unreliable, halves, plain_app, train, vector

VICTIM, ROUND = 2, 2


def _arrays(reply):
    """Return the one record with the model or update of a reply, and the name of its first array."""
    record = next(iter(reply.content.array_records.values()))
    return record, next(iter(record))


def _changed(change):
    """Return a fault that changes the numbers of the reply's first array."""

    def fault(reply):
        record, name = _arrays(reply)
        record[name] = Array(change(np.array(record[name].numpy())))

    return fault


def _raw(**parts):
    def fault(reply):
        record, name = _arrays(reply)
        old = record[name]
        record[name] = Array(**{"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data, **parts})

    return fault


def _spoilt(value):
    def change(x):
        x.reshape(-1)[0] = value
        return x

    return _changed(change)


def _counted(value):
    def fault(reply):
        metrics = next(iter(reply.content.metric_records.values()))
        if value is None:
            del metrics["num-examples"]
        else:
            metrics["num-examples"] = value

    return fault


def _extra(reply):
    record, name = _arrays(reply)
    record["more"] = record[name]


def _missing(reply):
    record, name = _arrays(reply)
    del record[name]


def _no_record(reply):
    for name in reply.content.array_records:
        del reply.content[name]


def _two_metrics(reply):
    reply.content["others"] = MetricRecord({"num-examples": 3})


def _pickled(reply):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    _raw(data=buffer.getvalue())(reply)


def _enormous(reply):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    _raw(data=header.getvalue())(reply)


#: Faults that change a reply, and a word of the reason that must be given.
CHANGES = {
    "NaN": (_spoilt(np.nan), "not finite"),
    "infinite": (_spoilt(np.inf), "not finite"),
    "a square that overflows": (_spoilt(1e200), "norm|not finite"),
    "longer than max_norm": (_spoilt(1e6), "more than 1000"),
    "shape (1,), which would be broadcast": (_changed(lambda x: x.reshape(-1)[:1]), "shape"),
    "another shape": (_changed(lambda x: np.concatenate([x, x])), "shape"),
    "another kind of numbers": (_changed(lambda x: x.astype(np.complex128)), "complex128"),
    "whole numbers": (_changed(lambda x: x.astype(np.int64)), "int64"),
    "an array too many": (_extra, "more"),
    "an array too few": (_missing, "lacks"),
    "no arrays": (_no_record, "lacks|array records"),
    "bytes cut off": (_raw(data=b"\x93NUMPY"), "no array"),
    "no bytes": (_raw(data=b""), "no array"),
    "a header whose brackets are open": (_raw(data=b"\x93NUMPY\x01\x00\x08\x00{'descr'("), "no array"),
    "a header that is no table": (_raw(data=b"\x93NUMPY\x01\x00\x04\x00\x00\x00\x00\x00"), "no array"),
    "another way of writing": (_raw(stype="pickle"), "pickle"),
    "a pickle": (_pickled, "object"),
    "a header that promises a terabyte": (_enormous, "shape|bytes"),
    "no count": (_counted(None), "examples"),
    "count 0": (_counted(0), "examples"),
    "negative count": (_counted(-5), "examples"),
    "enormous count": (_counted(10**12), "examples"),
    "count NaN": (_counted(float("nan")), "examples"),
    "a list of counts": (_counted([3, 4]), "examples"),
    "two metric records": (_two_metrics, "metric records"),
}


def _with(fault):
    """Apply a fault to the victim's reply of one round."""

    def deliver(t, replies):
        if t == ROUND:
            for reply in replies:
                fault(reply)
        return replies

    return deliver


class Old:
    """Answers with what it answered a round before."""

    def __init__(self):
        self.last = []

    def __call__(self, t, replies):
        last, self.last = self.last, copy.deepcopy(replies)
        return last if t == ROUND else replies


def _lost(t, replies):
    return [] if t == ROUND else replies


def _twice(t, replies):
    return replies + copy.deepcopy(replies) if t == ROUND else replies


def _died(t, replies):
    """A node that is gone: Flower's error then names the server as its sender."""
    if t != ROUND:
        return replies
    about = copy.deepcopy(replies[0].metadata)
    about.__dict__["_src_node_id"] = 1
    return [make_message(about, error=Error(4, "Node Unavailable"))]


def _stranger(t, replies):
    if t == ROUND:
        replies[0].metadata.__dict__["_src_node_id"] = 4242
    return replies


def _plain(victim=VICTIM, fault=None, **more):
    counted = {"weighting": "samples", "max_examples": 10**9}
    strategy = flower.FedDPC(max_norm=1000.0, min_available_nodes=NODES, fraction_evaluate=0.0, **counted, **more)
    grid = Unreliable(plain_app(), victim=victim, fault=fault)
    train(strategy, grid)
    return strategy


def _whole(victim=VICTIM, fault=None, **more):
    server, client = halves(cohort=NODES)
    strategy = flower.strategy("feddpc", max_norm=1000.0, **{**server, **more})
    train(strategy, Unreliable(flower.client_app(**client), victim=victim, fault=fault))
    return strategy


KINDS = pytest.mark.parametrize("run", [_plain, _whole], ids=["unchanged app", "whole protocol"])


@pytest.fixture(scope="module")
def without():
    """The models of runs in which the victim's reply of that round never came."""
    return {run: vector(run(fault=_lost)) for run in (_plain, _whole)}


def _check(strategy, expected, reason, node=1000 + VICTIM):
    (refusal,) = strategy.refusals
    assert (refusal.round, refusal.node) == (ROUND, node)
    assert any(word in refusal.reason for word in reason.split("|")), refusal.reason
    record = strategy.records[ROUND - 1]
    assert record.notes["refused"] == 1
    assert len(strategy.records) == 3
    assert torch.equal(vector(strategy), expected)


@KINDS
@pytest.mark.parametrize(("fault", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_a_bad_reply_costs_its_sender_a_vote(run, fault, reason, without):
    strategy = run(fault=_with(fault))
    _check(strategy, without[run], reason)
    assert strategy.records[ROUND - 1].rejected == [strategy.refusals[0].client]


def test_whoever_counts_samples_counts_whole_ones(without):
    """The weights of a drop-in are any positive numbers, as in Flower."""
    _check(_whole(fault=_with(_counted(1.5))), without[_whole], "examples")
    assert _plain(fault=_with(_counted(1.5))).refusals == []


@KINDS
def test_a_reply_that_never_comes_is_counted_as_no_answer(run, without):
    strategy = run(fault=_lost)
    assert strategy.refusals == []
    assert [len(r.dropped) for r in strategy.records] == [0, 1, 0]
    assert [len(r.participants) for r in strategy.records] == [NODES, NODES - 1, NODES]


@KINDS
def test_an_answer_for_an_old_round_is_refused(run, without):
    _check(run(fault=Old()), without[run], "round 1")


@KINDS
def test_who_answers_twice_counts_once(run):
    strategy = run(fault=_twice)
    _check(strategy, vector(run()), "already")
    assert strategy.records[ROUND - 1].rejected == []


@KINDS
def test_a_node_that_died_is_named_by_the_message_it_was_sent(run, without):
    _check(run(fault=_died), without[run], "Unavailable")


@KINDS
def test_a_stranger_is_not_heard(run, without):
    _check(run(fault=_stranger), without[run], "not asked", node=4242)


@KINDS
def test_an_exception_in_the_app_is_an_answer_too(run, without):
    def raises(t, replies):
        if t != ROUND:
            return replies
        return [make_message(copy.deepcopy(replies[0].metadata), error=Error(2, "ValueError: no such file"))]

    _check(run(fault=raises), without[run], "no such file")


def test_a_node_that_leaves_is_missed_and_nothing_else():
    server, client = halves(cohort=NODES)
    strategy = flower.strategy("feddpc", **server)
    grid = Unreliable(flower.client_app(**client))

    class Leaves(type(strategy)):
        def aggregate_train(self, server_round, replies):
            made = super().aggregate_train(server_round, replies)
            if server_round == 1:
                del grid.contexts[1000 + VICTIM]
            return made

    strategy.__class__ = Leaves
    train(strategy, grid)
    assert [r.dropped for r in strategy.records] == [[], [VICTIM], [VICTIM]]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("version", "0.0.1", "version"),
        ("method", "fedavg", "method"),
        ("experiment", "another", "experiment"),
        ("round", "1", "round"),
        ("client", 5, "another client"),
    ],
)
def test_a_reply_that_says_it_is_something_else_is_refused(key, value, reason, without):
    def lies(reply):
        reply.content["reply"][key] = value

    _check(_whole(fault=_with(lies)), without[_whole], reason)


def test_a_count_that_changed_since_enrolment_is_refused(without):
    _check(_whole(fault=_with(_counted(12))), without[_whole], "enrolled")


def test_a_loss_that_is_no_number_is_refused(without):
    def lies(reply):
        reply.content["metrics"]["loss"] = float("nan")

    _check(_whole(fault=_with(lies)), without[_whole], "loss")


def test_a_reply_from_another_app_is_refused(without):
    def foreign(reply):
        del reply.content["reply"]

    _check(_whole(fault=_with(foreign)), without[_whole], "client_app")


def test_metrics_of_another_kind_are_left_out_of_the_mean_but_the_update_counts():
    def odd(reply):
        metrics = next(iter(reply.content.metric_records.values()))
        metrics["loss"] = [1.0, 2.0]

    strategy = flower.FedDPC(min_available_nodes=NODES, fraction_evaluate=0.0, weighting="samples")
    result = train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=_with(odd)))
    others = [n for n in range(NODES) if n != VICTIM]
    expected = sum((10 + n) * n for n in others) / sum(10 + n for n in others)
    assert result.train_metrics_clientapp[ROUND]["loss"] == pytest.approx(expected)
    assert torch.equal(vector(strategy), vector(_plain()))


@KINDS
def test_a_round_without_a_quorum_does_not_count(run):
    strategy = run(fault=_lost, min_replies=NODES)
    assert [len(r.participants) for r in strategy.records] == [NODES, 0, NODES]


def test_a_failed_round_leaves_the_model_and_forgets_the_last_update():
    strategies = []
    for rounds in (1, 2):
        strategy = flower.FedDPC(min_available_nodes=NODES, fraction_evaluate=0.0, min_replies=NODES)
        train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=_lost), rounds=rounds)
        strategies.append(strategy)
    one, two = strategies
    assert two.now.round == 2
    assert torch.equal(vector(one), vector(two))
    assert bool(one.now.server["delta"].any())
    assert not bool(two.now.server["delta"].any())


def test_who_comes_after_the_deadline_is_not_waited_for():
    class Slow(flower.InProcessGrid):
        def deliver(self, message):
            if message.metadata.dst_node_id == 1000 + VICTIM:
                time.sleep(0.5)
            return super().deliver(message)

    strategy = flower.FedDPC(min_available_nodes=NODES, fraction_evaluate=0.0)
    began = time.monotonic()
    train(strategy, Slow(plain_app(), NODES), rounds=1, timeout=0.3)
    assert time.monotonic() - began < 5
    assert VICTIM not in strategy.records[0].participants
    assert VICTIM in strategy.records[0].dropped


def test_bad_evaluations_are_left_out():
    class Grid(Unreliable):
        def deliver(self, message):
            replies = super().deliver(message)
            if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 1000 + VICTIM:
                for reply in replies:
                    next(iter(reply.content.metric_records.values()))["num-examples"] = -1
            return replies

    strategy = flower.FedDPC(min_available_nodes=NODES)
    result = train(strategy, Grid(plain_app()), rounds=2)
    total = float(vector(strategy).sum())
    assert result.evaluate_metrics_clientapp[2]["sum"] == pytest.approx(total)
    assert [r.node for r in strategy.refusals] == [1000 + VICTIM] * 2


def test_what_was_refused_is_in_the_folder(tmp_path):
    strategy = flower.FedDPC(min_available_nodes=NODES, fraction_evaluate=0.0, folder=tmp_path / "run")
    train(strategy, Unreliable(plain_app(), victim=VICTIM, fault=_with(_spoilt(np.nan))))
    lines = [json.loads(line) for line in (tmp_path / "run" / "refused.jsonl").read_text().splitlines()]
    assert [(line["round"], line["node"]) for line in lines] == [(ROUND, 1000 + VICTIM)]
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [r["refused"] for r in rounds] == [0.0, 1.0, 0.0]
