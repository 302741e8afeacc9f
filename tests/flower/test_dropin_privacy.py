"""The drop-ins' privacy: the simulator's mechanism and accountant, with nodes drawn by independent coins."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord

from feddpc import flower, methods
from feddpc.errors import BadInputError, RunFolderError
from feddpc.flower import node_strategy
from feddpc.methods.base import Cohort
from feddpc.privacy import Mechanism, epsilon
from feddpc.round.server_step import apply_step_
from federations import NODES, Unreliable, W, halves, plain_app, train, vector

PRIVATE = {"clip": 0.5, "noise": 1.0, "delta": 0.01}
WANTED = {"population": NODES, "fraction_train": 0.5, "fraction_evaluate": 0.0}


def seeded(strategy):
    """Let the noise of a strategy come from a seed, so that it can be compared."""
    original = strategy.check_rounds

    def check(rounds):
        original(rounds)
        privacy = dataclasses.replace(strategy.policies.privacy, reproducible=True)
        strategy.policies = dataclasses.replace(strategy.policies, privacy=privacy)

    strategy.check_rounds = check
    return strategy


def updates(t, nodes):
    from federations import move

    rows = [np.concatenate([v.ravel() for v in move(n, t).values()]) for n in nodes]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", ["FedAvg", "FedDPC"])
def test_the_model_is_that_of_the_simulators_mechanism(name, monkeypatch):
    """Also in a round in which nobody was drawn: it is noise alone, and the model that clients get next has it."""
    coins = {1: [0, 3, 4], 2: [], 3: [1, 2]}
    drawn = iter(coins.values())
    place = "feddpc.flower.node_strategy.sample_by_coins"
    monkeypatch.setattr(place, lambda nodes, _: [nodes[i] for i in next(drawn)])
    sent = {}

    class Watching(Unreliable):
        def deliver(self, message):
            sent[int(message.metadata.group_id)] = message.content["arrays"]["bias"].numpy().copy()
            return super().deliver(message)

    strategy = seeded(getattr(flower, name)(**WANTED, privacy=PRIVATE))
    train(strategy, Watching(plain_app()))

    method = methods.create(name.lower())
    mechanism = Mechanism(**PRIVATE, cohort=NODES / 2, population=NODES)
    w, server = torch.zeros(8, dtype=torch.float64), method.init_server(torch.zeros(8, dtype=torch.float64), NODES)
    for t, nodes in coins.items():
        m = len(nodes)
        even = torch.full((m,), 1 / max(m, 1), dtype=torch.float64)
        cohort = Cohort(t, torch.tensor(nodes, dtype=torch.int64), NODES, even, torch.ones(m), 1.0, 1.0, {})
        up = {"delta": updates(t, nodes)} if m else {}
        step = mechanism.step(method, w, server, up, cohort)
        if t in sent:
            np.testing.assert_allclose(sent[t], w[-2:].numpy(), rtol=0, atol=1e-12)
        w, server = apply_step_(w.clone(), step), step.server
    torch.testing.assert_close(vector(strategy), w, rtol=0, atol=1e-12)
    assert [len(record.participants) for record in strategy.records] == [3, 0, 2]
    spent = [epsilon(1.0, 0.5, t, 0.01) for t in (1, 2, 3)]
    assert [record.notes["epsilon"] for record in strategy.records] == pytest.approx(spent)
    assert strategy.records[0].notes["clipped"] == 1.0


def test_every_node_comes_by_a_coin_of_its_own():
    """Binomial numbers with mean n q and variance n q (1 - q); a fraction of the nodes would have no variance."""
    counts = np.array([len(node_strategy.sample_by_coins(range(100), 0.3)) for _ in range(2000)])
    assert counts.mean() == pytest.approx(30, abs=5 * np.sqrt(21 / 2000))
    assert counts.var() == pytest.approx(21, rel=0.2)


def test_the_budget_is_kept_by_the_whole_run_and_after_a_restart(tmp_path):
    wanted = {**WANTED, "privacy": {"clip": 0.5, "epsilon": 4.0, "delta": 0.01}, "folder": tmp_path / "run"}
    first = flower.FedDPC(**wanted)
    train(first, Unreliable(plain_app()), 4)
    assert first.records[-1].notes["epsilon"] <= 4.0
    noise = first.policies.privacy.noise
    train(flower.FedDPC(**wanted), Unreliable(plain_app()), 4)
    with pytest.raises(BadInputError, match=r"privacy\.epsilon"):
        train(flower.FedDPC(**wanted), Unreliable(plain_app()), 6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] == first.records[-1].notes["epsilon"]
    assert f"noise {noise:g}" in json.loads((tmp_path / "run" / "privacy.json").read_text())["note"]


def test_a_restart_goes_on_counting(tmp_path):
    wanted = {**WANTED, "privacy": PRIVATE, "folder": tmp_path / "run"}
    train(flower.FedAvg(**wanted), Unreliable(plain_app()), 2)
    again = flower.FedAvg(**wanted)
    train(again, Unreliable(plain_app()), 3)
    assert again.records[-1].notes["epsilon"] == pytest.approx(epsilon(1.0, 0.5, 3, 0.01))
    with pytest.raises(RunFolderError, match="fraction_train"):
        train(flower.FedAvg(**{**wanted, "fraction_train": 0.25}), Unreliable(plain_app()), 4)
    with pytest.raises(RunFolderError, match="without privacy"):
        train(flower.FedAvg(**{**wanted, "privacy": None}), Unreliable(plain_app()), 4)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: flower.FedVARP(**WANTED, privacy=PRIVATE), "fedvarp"),
        (lambda: flower.FedAvg(fraction_train=0.5, privacy=PRIVATE), "population"),
        (lambda: flower.FedAvg(**{**WANTED, "fraction_train": 0.0}, privacy=PRIVATE), "fraction_train"),
        (lambda: flower.FedAvg(**WANTED, privacy=PRIVATE, weighting="samples"), "weighting"),
        (lambda: flower.FedAvg(**WANTED, privacy=PRIVATE, rule="median"), "rule"),
        (lambda: flower.FedAvg(**WANTED, privacy=PRIVATE, screen={"norm": 5}), "screen"),
        (lambda: flower.FedAvg(**WANTED, privacy=PRIVATE, min_replies=2), "min_replies"),
        (lambda: flower.FedAvg(**WANTED, privacy=PRIVATE, min_train_nodes=4), "min_train_nodes"),
        (lambda: flower.FedDPC(**WANTED, privacy=PRIVATE, guard="exclude"), "guard"),
        (lambda: flower.FedAvg(**WANTED, privacy={"clip": 1.0}), "privacy.epsilon"),
        (lambda: flower.FedAvg(**WANTED, privacy={**PRIVATE, "delta": 0.5}), "privacy.delta"),
        (lambda: flower.FedAvg(**WANTED, privacy={**PRIVATE, "clips": 1.0}), "clips"),
    ],
)
def test_what_would_break_the_promise_is_refused(make, field):
    with pytest.raises(BadInputError, match=field):
        make()


def test_buffers_have_no_noise_and_are_refused():
    arrays = ArrayRecord({**W, "bn.running_var": Array(np.ones(2))})
    strategy = flower.FedAvg(**WANTED, privacy=PRIVATE)
    with pytest.raises(BadInputError, match="buffers"):
        strategy.start(Unreliable(plain_app()), arrays, num_rounds=1)


def test_without_start_nobody_knows_how_much_noise_is_needed():
    strategy = flower.FedAvg(**WANTED, privacy=PRIVATE)
    with pytest.raises(BadInputError, match="start"):
        strategy.configure_train(1, W, ConfigRecord(), Unreliable(plain_app()))


def test_a_round_without_replies_goes_on_and_nobody_is_quarantined():
    """A run that ends, or a node that is left out, because of what another client did would tell about that one."""

    def nothing(t, replies):
        return []

    grid = Unreliable(plain_app(), 1, victim=0, fault=nothing)
    strategy = flower.FedAvg(**{**WANTED, "fraction_train": 1.0}, min_available_nodes=1, privacy=PRIVATE)
    train(strategy, grid, 5)
    assert [record.participants for record in strategy.records] == [[]] * 5
    assert strategy.quarantine is None


def test_a_model_that_left_the_server_counts_although_a_crash_undid_its_round(tmp_path):
    """The round is run again with other coins and other noise, so that there are two models of it."""

    class Killed(BaseException):
        pass

    class Mortal(Unreliable):
        dies = True

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            if self.dies and messages and messages[0].metadata.message_type == "evaluate":
                raise Killed
            return replies

    wanted = {**WANTED, "fraction_evaluate": 1.0, "folder": tmp_path / "run", "privacy": PRIVATE}
    killed = flower.FedAvg(**wanted)
    killed.run_log.close = lambda: killed.run_log._run.close()  # a kill leaves no time to write the round
    with pytest.raises(Killed):
        train(killed, Mortal(plain_app()), 3)
    again = flower.FedAvg(**wanted)
    train(again, Unreliable(plain_app()), 3)
    assert [r.round for r in again.records] == [1, 2, 3]
    assert [r.notes["epsilon"] for r in again.records] == [epsilon(1.0, 0.5, t + 1, 0.01) for t in (1, 2, 3)]
    later = flower.FedAvg(**wanted)
    train(later, Unreliable(plain_app()), 4)
    assert later.records[0].notes["epsilon"] == epsilon(1.0, 0.5, 5, 0.01)


def test_every_model_counts_that_left_the_server_after_the_checkpoint(tmp_path):
    wanted = {**WANTED, "folder": tmp_path / "run", "privacy": PRIVATE}
    train(flower.FedAvg(**wanted), Unreliable(plain_app()), 3)
    (tmp_path / "run" / "releases.json").write_text('{"last": 5, "lost": 1}')
    again = flower.FedAvg(**wanted)
    train(again, Unreliable(plain_app()), 4)
    assert again.run_log.lost == 3
    assert again.records[-1].notes["epsilon"] == epsilon(1.0, 0.5, 4 + 3, 0.01)


def test_a_second_start_without_a_folder_would_forget_the_first(tmp_path):
    strategy = flower.FedAvg(**WANTED, privacy=PRIVATE)
    result = train(strategy, Unreliable(plain_app()), 2)
    with pytest.raises(BadInputError, match="folder"):
        strategy.start(Unreliable(plain_app()), result.arrays, num_rounds=2)
    kept = flower.FedAvg(**WANTED, privacy=PRIVATE, folder=tmp_path / "run")
    for rounds in (2, 3):
        train(kept, Unreliable(plain_app()), rounds)
    assert kept.records[-1].notes["epsilon"] == epsilon(1.0, 0.5, 3, 0.01)


@pytest.mark.parametrize("quarantine", [{"after": 2}, True])
def test_a_quarantine_that_was_asked_for_is_refused(quarantine):
    with pytest.raises(BadInputError, match="quarantine"):
        flower.FedAvg(**WANTED, privacy=PRIVATE, quarantine=quarantine)
    server, _ = halves()
    private = {"participation": "poisson", "privacy": PRIVATE}
    with pytest.raises(BadInputError, match="quarantine"):
        flower.strategy("fedavg", **{**server, **private, "quarantine": quarantine})


@pytest.mark.parametrize("value", [True, 8.0, "strong"])
def test_a_budget_that_is_no_table_is_named(value):
    with pytest.raises(BadInputError, match="privacy"):
        flower.FedAvg(**WANTED, privacy=value)


def test_a_budget_is_not_spent_twice_by_a_crash(tmp_path):
    three = {**PRIVATE, "epsilon": epsilon(1.0, 0.5, 3, 0.01) * (1 + 1e-9)}
    wanted = {**WANTED, "folder": tmp_path / "run", "privacy": three}
    train(flower.FedAvg(**wanted), Unreliable(plain_app()), 2)
    (tmp_path / "run" / "releases.json").write_text('{"last": 3, "lost": 0}')
    with pytest.raises(BadInputError, match="num_rounds = 2"):
        train(flower.FedAvg(**wanted), Unreliable(plain_app()), 3)
