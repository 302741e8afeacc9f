"""A drop-in stands where Flower's FedAvg stood: same arguments, same client app, same result object."""

import inspect
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, Result

from feddpc import flower, methods
from feddpc.errors import BadInputError
from feddpc.flower.dropin import dropins
from feddpc.flower.messages import ReplyTensors
from feddpc.flower.method_traits import sends_plain_updates
from feddpc.methods.base import Cohort
from feddpc.round.server_step import apply_step_
from federations import NODES, Unreliable, W, move, plain_app, train, vector
from support import VARIANTS

EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES}


def updates(t, nodes=range(NODES)):
    """What the clients send in round ``t``, as vectors."""
    return torch.stack([torch.from_numpy(np.concatenate([v.ravel() for v in move(n, t).values()])) for n in nodes])


def by_hand(method, rounds, *, population=NODES, server_lr=1.0):
    """The models that ``method`` makes of these updates, step by step, by its own definition."""
    w, slots = torch.zeros(8, dtype=torch.float64), None
    server = method.init_server(w, population)
    for t in range(1, rounds + 1):
        fresh = method.init_slot(w)
        slots = {k: v.expand(NODES, *v.shape).clone() for k, v in fresh.items()} if slots is None else slots
        even = torch.full((NODES,), 1 / NODES, dtype=torch.float64)
        cohort = Cohort(t, torch.arange(NODES), population, even, torch.ones(NODES), 1.0, server_lr, slots)
        step = method.aggregate(w, server, {"delta": updates(t)}, cohort)
        w, server, slots = apply_step_(w.clone(), step), step.server, step.slots
    return w


@pytest.mark.parametrize("name", sorted(dropins()))
def test_a_drop_in_is_the_method_on_the_updates_of_an_unchanged_app(name):
    more = {} if name in ("FedDPC", "FedAvg", "FedExP") else {"population": NODES}
    hyper = {"clusters": 3} if name == "ClusterFedVARP" else {}
    strategy = getattr(flower, name)(**EVERYBODY, **more, **hyper, server_lr=0.7)
    result = train(strategy, Unreliable(plain_app()))
    method = methods.create(dropins()[name].made_from.name, **hyper)
    torch.testing.assert_close(vector(strategy), by_hand(method, 3, server_lr=0.7), rtol=0, atol=1e-12)
    assert isinstance(result, Result)
    assert list(result.arrays) == ["weight", "bias"]
    flat = np.concatenate([result.arrays[k].numpy().ravel() for k in ("weight", "bias")])
    assert np.array_equal(flat, vector(strategy).numpy())


def test_fedavg_with_weights_by_samples_is_flowers():
    theirs, ours = FedAvg(**EVERYBODY), flower.FedAvg(**EVERYBODY, weighting="samples")
    a, b = (train(s, Unreliable(plain_app())) for s in (theirs, ours))
    for name in W:
        np.testing.assert_allclose(a.arrays[name].numpy(), b.arrays[name].numpy(), rtol=0, atol=1e-12)
    assert a.evaluate_metrics_clientapp[3]["sum"] == pytest.approx(b.evaluate_metrics_clientapp[3]["sum"])
    assert a.train_metrics_clientapp[3]["loss"] == pytest.approx(b.train_metrics_clientapp[3]["loss"])


def test_arguments_are_flowers_in_their_order():
    theirs = list(inspect.signature(FedAvg).parameters)
    for cls in dropins().values():
        assert list(inspect.signature(cls).parameters)[: len(theirs)] == theirs
    assert "lam" in inspect.signature(flower.FedDPC).parameters
    strategy = flower.FedDPC(0.5, 0.0, 3, 1, 4, lam=2.0)
    assert (strategy.fraction_train, strategy.fraction_evaluate, strategy.min_train_nodes) == (0.5, 0.0, 3)
    assert (strategy.min_available_nodes, strategy.method.lam) == (4, 2.0)


def test_functions_for_metrics_are_used():
    def worst(contents, weighted_by):
        return MetricRecord({f"worst by {weighted_by}": max(c["metrics"]["loss"] for c in contents)})

    strategy = flower.FedDPC(**EVERYBODY, train_metrics_aggr_fn=worst, fraction_evaluate=0.0)
    result = train(strategy, Unreliable(plain_app()))
    assert result.train_metrics_clientapp[1]["worst by num-examples"] == NODES - 1


def test_configuration_and_central_evaluation_pass_as_in_flower():
    seen, strategy = [], flower.FedDPC(**EVERYBODY, fraction_evaluate=0.0)

    def evaluate(t, arrays):
        seen.append((t, float(sum(a.numpy().sum() for a in arrays.values()))))
        return MetricRecord({"t": t})

    result = train(strategy, Unreliable(plain_app()), train_config=ConfigRecord({"lr": 0.1}), evaluate_fn=evaluate)
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    assert seen[-1][1] == pytest.approx(float(vector(strategy).sum()))
    assert result.evaluate_metrics_serverapp[3]["t"] == 3


def test_the_evaluated_model_is_the_one_that_the_authors_look_at():
    seen = []
    strategy = flower.FedExP(**EVERYBODY, fraction_evaluate=0.0, evaluate="pair")

    def evaluate(t, arrays):
        seen.append(np.concatenate([a.numpy().ravel() for a in arrays.values()]))
        models.append(vector(strategy).clone().numpy())

    models = []
    train(strategy, Unreliable(plain_app()), evaluate_fn=evaluate)
    np.testing.assert_allclose(seen[3], (models[3] + models[2]) / 2, rtol=0, atol=1e-15)


def test_it_works_without_its_own_start():
    """A wrapper of Flower calls the four functions itself."""
    grid, strategy, arrays = Unreliable(plain_app()), flower.FedDPC(**EVERYBODY), W
    for t in (1, 2):
        messages = strategy.configure_train(t, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(t, grid.send_and_receive(messages))
    again = flower.FedDPC(**EVERYBODY)
    train(again, Unreliable(plain_app()), 2)
    assert torch.equal(vector(strategy), vector(again))


def test_a_model_that_somebody_changed_between_rounds_is_the_one_that_counts():
    grid, strategy = Unreliable(plain_app()), flower.FedAvg(**EVERYBODY)
    moved = ArrayRecord({k: Array(a.numpy() + 1) for k, a in W.items()})
    for t, arrays in ((1, W), (2, moved)):
        strategy.aggregate_train(t, grid.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord(), grid)))
    torch.testing.assert_close(vector(strategy), 1 - updates(2).mean(0), rtol=0, atol=1e-12)


def test_which_methods_are_plain_follows_from_what_they_do():
    plain = {name for name, method in VARIANTS.items() if sends_plain_updates(method)}
    assert plain == {
        *("feddpc", "feddpc streaming", "feddpc no scaling", "feddpc neither", "feddpc by steps", "feddpc exclude"),
        "feddpc momentum",
        *("feddpc soft", "feddpc keep", "fedavg", "fedexp", "fedexp pair", "fedexp code", "fedvarp", "clusterfedvarp"),
        *("mifa", "mifa wait", "fednova", "fedavgm", "fedadam", "fedyogi", "fedadagrad"),
    }
    assert "FedNova" not in dropins()  # its server must know the numbers of local steps


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: flower.FedDPC(form="client"), "client half of its own"),
        (lambda: flower.FedDPC(normalize_by_steps=True), "number of local steps"),
        (lambda: flower.FedDPC(lamda=1), "did you mean 'lam'"),
        (lambda: flower.FedDPC(server_lr=0), "server_lr"),
        (lambda: flower.FedDPC(min_replies=0), "min_replies"),
        (lambda: flower.FedDPC(max_norm=-1.0), "max_norm"),
        (lambda: flower.FedDPC(weighting="size"), "weighting"),
        (lambda: flower.MIFA(), "population"),
        (lambda: flower.ClusterFedVARP(population=20, weighting="samples"), "weighting"),
        (lambda: flower.ClusterFedVARP(), "population"),
        (lambda: flower.MIFA(population=4, weighting="samples"), "never came"),
    ],
)
def test_bad_arguments_are_explained(make, reason):
    with pytest.raises(BadInputError, match=reason):
        make()


def test_a_client_beyond_the_population_is_refused():
    strategy = flower.MIFA(**EVERYBODY, population=NODES - 1, fraction_evaluate=0.0)
    train(strategy, Unreliable(plain_app()), 1)
    (refusal,) = strategy.refusals
    assert "larger population" in refusal.reason
    assert len(strategy.records[0].participants) == NODES - 1


def test_the_server_holds_one_update_at_a_time(monkeypatch):
    """FedDPC's drop-in streams: however many replies there are, all updates pass through one place."""
    places = set()
    original = ReplyTensors.__iter__

    def watched(self):
        for update in original(self):
            places.add(update.data_ptr())
            yield update

    monkeypatch.setattr(ReplyTensors, "__iter__", watched)
    train(flower.FedDPC(**EVERYBODY, fraction_evaluate=0.0), Unreliable(plain_app()), 2)
    assert len(places) == 1


class OneByOne(flower.InProcessGrid):
    """Brings replies one by one, and looks how many of the earlier ones are still held."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes, one_by_one=True)
        self.held = []

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        if not all(m.metadata.message_type == "train" for m in messages):
            return replies
        return self._watched(replies)

    def _watched(self, replies):
        alive = []
        for reply in replies:
            arrays = reply.content["arrays"]
            alive.append(weakref.ref(arrays))
            yield reply
            del reply, arrays
            self.held.append(sum(ref() is not None for ref in alive))


@pytest.mark.parametrize("how", [{}, {"weighting": "samples"}, {"guard": "exclude"}, {"momentum": 0.5}])
def test_replies_that_come_one_by_one_are_forgotten_one_by_one(how):
    wanted = {**EVERYBODY, "fraction_evaluate": 0.0, "screen": None, **how}
    all_at_once, one_by_one = flower.FedDPC(**wanted), flower.FedDPC(**wanted)
    train(all_at_once, Unreliable(plain_app()))
    grid = OneByOne(plain_app(), NODES)
    result = train(one_by_one, grid)
    torch.testing.assert_close(vector(one_by_one), vector(all_at_once), rtol=0, atol=1e-12)
    assert [r.participants for r in one_by_one.records] == [r.participants for r in all_at_once.records]
    assert result.train_metrics_clientapp[3]["loss"] == pytest.approx(np.mean(range(NODES)), abs=2)
    assert max(grid.held) == 1


def test_a_stream_without_a_quorum_changes_nothing():
    class Losing(OneByOne):
        def deliver(self, message):
            return [] if message.metadata.dst_node_id == 1003 else super().deliver(message)

    strategy = flower.FedDPC(**EVERYBODY, fraction_evaluate=0.0, min_replies=NODES, screen=None)
    train(strategy, Losing(plain_app(), NODES), 2)
    assert [record.participants for record in strategy.records] == [[], []]
    assert not vector(strategy).any()
    assert not strategy.now.server["delta"].any()
