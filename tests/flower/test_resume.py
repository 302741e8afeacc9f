"""A run that was killed goes on from its last round and ends where an uninterrupted one does, bit by bit."""

import functools
import json

import numpy as np
import pytest
import torch
from flwr.app import Array

from feddpc import flower
from feddpc.errors import FolderInUseError, RunFolderError
from feddpc.runs.record import RunFolder
from federations import NODES, Unreliable, halves, plain_app, train, vector
from support import VARIANTS

#: One of every kind of memory: none, at the server, of clients at the server, at clients, before round 1, in the data.
SOME = (
    *("feddpc streaming", "fedavg", "fedexp pair", "mifa wait", "fedvarp", "clusterfedvarp", "scaffold", "scaffold I"),
    *("scaffold warm", "feddyn clients", "feddc", "moon", "fedga", "fedga fresh", "fedamd", "fedspeed", "faug", "gmm"),
    *("fedbr", "datasharing"),
)
ROUNDS, KILLED = 5, 3


class Killed(BaseException):
    """What a kill looks like from inside."""


class Mortal(Unreliable):
    """A grid whose server is killed when all clients of a round have trained and none of their replies was used."""

    dies = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if (
            messages
            and messages[0].metadata.message_type == "train"
            and messages[0].metadata.group_id == str(self.dies)
        ):
            raise Killed
        return replies


@functools.cache
def uninterrupted(name):
    """The strategy of a federation that nobody killed, to be read."""
    method = VARIANTS[name]
    server, client = halves(reserve=method.reserve, dropout=0.2)
    whole = flower.strategy(method, **server)
    train(whole, Mortal(flower.client_app(**client)), ROUNDS)
    return whole


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("nodes", ["stay", "restart"])
def test_a_killed_server_goes_on_where_it_was(name, nodes, tmp_path):
    """Round 3 is lost half way: clients had trained and would remember it, the server had not used it."""
    method, whole = VARIANTS[name], uninterrupted(name)
    server, client = halves(reserve=method.reserve, dropout=0.2)
    app = flower.client_app(**client, folder=tmp_path / "clients")
    grid = Mortal(app)
    grid.dies = KILLED
    with pytest.raises(Killed):
        train(flower.strategy(method, **server, folder=tmp_path / "run"), grid, ROUNDS)
    again = flower.strategy(method, **server, folder=tmp_path / "run")
    grid.dies = 0
    result = train(again, Mortal(app) if nodes == "restart" else grid, ROUNDS)

    assert [r.round for r in again.records] == [3, 4, 5]
    assert torch.equal(vector(again), vector(whole))
    assert again.refusals == []
    assert all(torch.equal(again.now.server[k], v) for k, v in whole.now.server.items())
    assert sorted(result.train_metrics_clientapp) == [r.round for r in again.records if r.participants]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["test_loss"] for line in lines] == [r.metrics["test_loss"] for r in whole.records]


def test_without_a_folder_a_client_that_restarts_has_forgotten_and_says_so(tmp_path, caplog):
    server, client = halves()
    app = flower.client_app(**client)
    train(flower.strategy("feddyn", **server, folder=tmp_path / "run"), Unreliable(app), 3)
    again = flower.strategy("feddyn", **server, folder=tmp_path / "run")
    train(again, Unreliable(app), 5)
    assert again.now.round == 5
    assert "memory of round" in caplog.text


def test_a_drop_in_goes_on_too(tmp_path):
    """With all clients in every round, since Flower samples nodes with a generator of the process."""

    def run(name, rounds, **more):
        strategy = getattr(flower, name)(min_train_nodes=NODES, fraction_evaluate=0.0, **more)
        train(strategy, Unreliable(plain_app()), rounds)
        return strategy

    for name, more in (("FedDPC", {}), ("FedExP", {"evaluate": "pair"}), ("MIFA", {"population": NODES})):
        whole = run(name, 5, **more)
        folder = tmp_path / name
        run(name, 2, folder=folder, **more)
        half = run(name, 5, folder=folder, **more)
        assert [r.round for r in half.records] == [3, 4, 5]
        assert torch.equal(vector(half), vector(whole))
        finished = run(name, 5, folder=folder, **more)
        assert finished.records == []
        assert torch.equal(vector(finished), vector(whole))


def test_the_numbers_of_nodes_survive_a_restart(tmp_path):
    few = {"population": NODES, "fraction_train": 0.25, "fraction_evaluate": 0.0, "folder": tmp_path / "run"}
    first, again, grid = flower.MIFA(**few), flower.MIFA(**few), Unreliable(plain_app())
    train(first, grid, 2)
    train(again, grid, 3)
    assert again.client_of == first.client_of == {1000 + i: i for i in range(NODES)}


def spoilt(t, replies):
    """Put a NaN into an upload."""
    record = next(iter(replies[0].content.array_records.values()))
    name = next(iter(record))
    record[name] = Array(record[name].numpy() * np.nan)
    return replies


def plain_run(folder, rounds):
    """Rounds of a drop-in in which the replies of node 1002 are refused."""
    strategy = flower.FedDPC(min_train_nodes=NODES, fraction_evaluate=0.0, folder=folder)
    train(strategy, Unreliable(plain_app(), victim=2, fault=spoilt), rounds)
    return strategy


def test_refusals_of_a_round_that_is_run_again_are_listed_once(tmp_path):
    """The list is written before the checkpoint, and a kill may come between the two, or in the middle of a line."""
    plain_run(tmp_path / "whole", 3)
    plain_run(tmp_path / "cut", 2)
    with (tmp_path / "cut" / "refused.jsonl").open("a") as file:
        file.write('{"round": 3, "node": 1002, "client": 2, "reason": "late"}\n{"round": 3, "no')
    plain_run(tmp_path / "cut", 3)
    listed = (tmp_path / "cut" / "refused.jsonl").read_text()
    assert listed == (tmp_path / "whole" / "refused.jsonl").read_text()
    assert [json.loads(line)["round"] for line in listed.splitlines()] == [1, 2, 3]


DAMAGE = pytest.mark.parametrize(
    "damage", [lambda data: data[:-2], lambda data: b"~" + data[1:], lambda data: b"", None]
)


@pytest.mark.parametrize("name", ["checkpoint.json", "round-0000002.safetensors"])
@DAMAGE
def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before(tmp_path, name, damage):
    whole = plain_run(tmp_path / "whole", 3)
    plain_run(tmp_path / "run", 2)
    path = tmp_path / "run" / "checkpoint" / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="of round 1"):
        again = plain_run(tmp_path / "run", 3)
    assert torch.equal(vector(again), vector(whole))


@pytest.mark.parametrize("name", ["rounds.jsonl", "refused.jsonl"])
@DAMAGE
def test_a_damaged_file_is_named_and_nothing_is_changed(tmp_path, name, damage):
    whole = plain_run(tmp_path / "whole", 3)
    plain_run(tmp_path / "run", 2)
    path = tmp_path / "run" / name
    good = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage(good))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RunFolderError, match=rf"{path.name}|the checkpoint in"):
        plain_run(tmp_path / "run", 3)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    path.write_bytes(good)
    assert torch.equal(vector(plain_run(tmp_path / "run", 3)), vector(whole))


def test_two_servers_on_one_folder(tmp_path):
    plain_run(tmp_path / "run", 1)
    held = RunFolder.reopen(tmp_path / "run")
    with pytest.raises(FolderInUseError, match="in use by another process"):
        plain_run(tmp_path / "run", 2)
    held.close()
    assert plain_run(tmp_path / "run", 2).now.round == 2


def test_a_client_whose_memory_is_damaged_says_so_and_the_others_go_on(tmp_path):
    server, client = halves(cohort=NODES)
    app = flower.client_app(**client, folder=tmp_path / "clients")
    train(flower.strategy("scaffold", **server, folder=tmp_path / "run"), Unreliable(app), 2)
    (path,) = (tmp_path / "clients").glob("*-client-5.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    again = flower.strategy("scaffold", **server, folder=tmp_path / "run")
    train(again, Unreliable(app), 3)
    (refusal,) = again.refusals
    assert (refusal.round, refusal.client) == (3, 5)
    assert "does not match its checksum" in refusal.reason
    assert again.records[-1].participants == [0, 1, 2, 3, 4, 6, 7]


def test_a_folder_of_another_experiment_is_refused(tmp_path):
    server, client = halves()
    train(flower.strategy("feddpc", **server, folder=tmp_path / "run"), Unreliable(flower.client_app(**client)), 1)
    other = flower.strategy("feddpc", **{**server, "lr": 0.5}, folder=tmp_path / "run")
    with pytest.raises(RunFolderError, match="another configuration"):
        train(other, Unreliable(flower.client_app(**client)), 2)


def test_a_finished_run_reads_like_one_of_the_simulator(tmp_path):
    from feddpc.runs.stored import load

    server, client = halves()
    strategy = flower.strategy("feddpc", **server, folder=tmp_path / "run")
    train(strategy, Unreliable(flower.client_app(**client)), 3)
    run = load(tmp_path / "run")
    assert run.config.engine == "flower"
    assert run.summary["status"] == "finished"
    assert run.summary["final_accuracy"] == strategy.records[-1].metrics["test_accuracy"]
    assert [r["participants"] for r in run.records] == [r.participants for r in strategy.records]
