"""Server and nodes of different releases: overlapping protocols work together, others are refused with both ranges."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict

from feddpc import flower
from feddpc.errors import BadInputError
from feddpc.flower import SUPPORTED, messages, versions
from feddpc.flower.messages import REFUSED, REPLY, SPEC, ExperimentSpec, RefusedError
from feddpc.flower.secure.internals import PRIVATE, Private, check_internals
from federations import halves, train, vector

ROOT = Path(__file__).parents[2]


class MixedGrid(flower.InProcessGrid):
    """A grid whose nodes have another release: while a node works, the library states what they would state."""

    def __init__(self, app, nodes, theirs, monkeypatch):
        super().__init__(app, nodes)
        self.theirs, self.monkeypatch = theirs, monkeypatch

    def deliver(self, message):
        release, oldest, newest = self.theirs
        with self.monkeypatch.context() as patch:
            patch.setattr(versions, "__version__", release)
            patch.setattr(versions, "OLDEST", oldest)
            patch.setattr(versions, "NEWEST", newest)
            return super().deliver(message)


def run(theirs, monkeypatch, ours=("0.2.0", 1, 1), **more):
    for name, value in zip(("__version__", "OLDEST", "NEWEST"), ours, strict=True):
        monkeypatch.setattr(versions, name, value)
    server, client = halves(method="scaffold")
    strategy = flower.strategy("scaffold", **server, **more)
    train(strategy, MixedGrid(flower.client_app(**client), server["clients"], theirs, monkeypatch))
    return strategy


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("0.1.9", 1, 1), ("0.2.0", 1, 1)),  # another release, the same protocol
        (("0.3.0", 1, 2), ("0.2.0", 1, 1)),  # nodes first
        (("0.2.0", 1, 1), ("0.3.0", 1, 2)),  # server first
        (("0.3.0", 1, 2), ("0.4.0", 2, 3)),
    ],
)
def test_overlapping_ranges_work_together_with_the_same_numbers(theirs, ours, monkeypatch):
    same = vector(run(("0.2.0", 1, 1), monkeypatch))
    mixed = run(theirs, monkeypatch, ours)
    assert torch.equal(vector(mixed), same)
    assert mixed.refusals == []


@pytest.mark.parametrize(
    ("theirs", "ours", "upgrade"),
    [
        (("0.2.0", 1, 1), ("0.9.0", 2, 4), "this node"),
        (("0.9.0", 2, 4), ("0.2.0", 1, 1), "the server"),
    ],
)
def test_ranges_that_do_not_overlap_are_refused_with_both_and_what_to_upgrade(theirs, ours, upgrade, monkeypatch):
    with pytest.raises(BadInputError) as error:
        run(theirs, monkeypatch, ours, wait=0.2)
    text = str(error.value)
    for part in ("feddpc 0.2.0 with protocol 1", "feddpc 0.9.0 with protocols 2 to 4", f"upgrade {upgrade}"):
        assert part in text


def test_a_server_of_a_release_without_protocols_is_refused_with_what_to_upgrade():
    server, _ = halves()
    spec = flower.strategy("feddpc", **server).nodes.spec
    old = dataclasses.replace(spec, version="0.1.0")
    with pytest.raises(RefusedError, match="upgrade the server"):
        ExperimentSpec.read(RecordDict({SPEC: old.record()}))


@pytest.mark.parametrize("stated", [None, 3, "", "0.1 protocol 2-", "0.1 protocol 9999999-1", "x" * 10_000])
def test_what_states_no_protocol_is_refused_and_shortened(stated):
    with pytest.raises(versions.ProtocolError) as error:
        versions.agreed(stated, "the server", "this node")
    assert len(str(error.value)) < 300


def test_a_reply_of_another_protocol_costs_its_sender_the_vote(monkeypatch):
    def lies(reply):
        reply.content[REPLY]["version"] = "0.9.0 protocol 7-8"
        return reply

    class Grid(flower.InProcessGrid):
        def deliver(self, message):
            replies = super().deliver(message)
            return [lies(r) for r in replies] if message.metadata.message_type == "train" else replies

    server, client = halves()
    strategy = flower.strategy("feddpc", **server, max_void_rounds=5)
    train(strategy, Grid(flower.client_app(**client), server["clients"]))
    assert strategy.refusals
    assert all("protocols 7 to 8" in refusal.reason for refusal in strategy.refusals)


def test_an_experiment_keeps_its_name_when_the_server_is_upgraded(monkeypatch):
    server, _ = halves()
    before = flower.strategy("feddpc", **server).nodes.spec
    monkeypatch.setattr(versions, "__version__", "9.9.9")
    after = flower.strategy("feddpc", **server).nodes.spec
    assert before.version != after.version
    assert before.tag == after.tag  # clients find their memories by it


def test_protocol_1_is_what_was_released():
    """Whoever changes what messages hold must give the new form a new number, and go on speaking the old one."""
    assert (versions.OLDEST, versions.NEWEST) == (1, 1)
    assert [f.name for f in dataclasses.fields(ExperimentSpec)] == [
        "version",
        "layout",
        "target",
        "classes",
        "settings",
    ]
    assert set(messages.CLIENT_KEYS) == {
        *("method", "hyper", "seed", "clients", "batch_size", "epochs", "lr", "scaling", "augment", "precision"),
        *("client_optimizer", "client_optimizer_options", "clip_norm", "task", "loss", "metrics", "transform"),
    }
    server, client = halves()
    strategy, headers = flower.strategy("feddpc", **server), []

    class Grid(flower.InProcessGrid):
        def deliver(self, message):
            replies = super().deliver(message)
            headers.extend(set(reply.content[REPLY]) - {REFUSED} for reply in replies)
            return replies

    train(strategy, Grid(flower.client_app(**client), server["clients"]), rounds=1)
    assert {frozenset(header) for header in headers} == {
        frozenset({"version", "round", "experiment", "method", "client"})
    }


# Flower.


def test_the_declared_range_of_flower_is_the_one_that_is_checked_and_tested():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    assert declared == [f"flwr>={low},<{high}"]
    from flower_matrix import TESTED

    minors = {tuple(int(part) for part in version.split(".")[:2]) for version in TESTED}
    (major, first), (_, after) = SUPPORTED
    assert minors == {(major, minor) for minor in range(first, after)}
    assert f"| {' | '.join(TESTED)} |" in (ROOT / "docs" / "flower.md").read_text()


def test_the_scaffold_asks_for_the_same_range():
    template = (ROOT / "src/feddpc/federate/template/pyproject.toml.txt").read_text()
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    assert tomllib.loads(template.replace("$name", "x"))["project"]["dependencies"] == [f"flwr>={low},<{high}"]


def test_every_private_function_of_flower_that_secure_sums_need_is_there():
    check_internals()
    source = (ROOT / "src/feddpc/flower/secure/protocol.py").read_text()
    rebound = set(re.findall(r"rebound\((?:SecAggPlusWorkflow\.)?(\w+)", source)) - {"function", "statistics"}
    assert rebound == {p.path.rpartition(".")[2] for p in PRIVATE if p.looks_up}


@pytest.mark.parametrize(
    ("needed", "why"),
    [
        (Private("flwr.nowhere", "f"), "does not have it"),
        (Private("flwr.server.workflow", "SecAggPlusWorkflow.nothing"), "does not have it"),
        (Private(PRIVATE[0].module, "secaggplus_mod", looks_up=("other",)), "does not call other"),
        (Private(PRIVATE[2].module, "pseudo_rand_gen", takes=("seed",)), "takes other arguments than seed"),
    ],
)
def test_a_flower_without_a_private_function_is_refused_by_its_name(needed, why):
    with pytest.raises(BadInputError) as error:
        check_internals((needed,))
    assert f"{needed.module}.{needed.path}" in str(error.value)
    assert why in str(error.value)


def test_what_a_message_says_is_json_that_both_ends_know():
    server, _ = halves()
    spec = flower.strategy("feddpc", **server).nodes.spec
    assert set(json.loads(spec.settings)) <= set(messages.CLIENT_KEYS)
