"""Every reader of Flower's messages, as a function of a record dict's bytes on the wire.

What Flower itself cannot read never reaches a reader of ours. A server hears a foreign reply beside an honest one, and
must go on with a model that is finite; a client hears a foreign message, and must say what is wrong with it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from unittest import mock

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from feddpc import flower
from feddpc.errors import FeddpcError
from feddpc.flower import versions
from feddpc.flower.client import Memory
from feddpc.flower.client_app_strategy import ClientAppStrategy
from feddpc.flower.messages import REFUSED, REPLY, pack
from feddpc.flower.method_strategy import MethodStrategy
from feddpc.flower.secure import client as secure_client
from feddpc.flower.secure.encoding import SECURE
from feddpc.flower.secure.protocol import check_reply
from feddpc.flower.server import Reserve
from feddpc.methods import create
from feddpc.models.base import BodyAndHead
from feddpc.round.state import RunState
from fuzz.place import file, target

#: What a client may be asked; the first byte of an input chooses.
ACTIONS = ("train", "evaluate", "query.hello", "query.learn", "query.setup", "query.survey", "query.probe")
#: Little work for methods that do much before round 1.
LITTLE = {
    "datasharing": {"beta": 0.4, "warmup": 1},
    "faug": {"gan_steps": 1, "seeds": 1},
    "fedbr": {"pseudo": 2, "averaged": 2},
    "fedga": {"variant": "fresh"},
    "gmm": {"components": 1, "em_rounds": 1},
}
STAGES = tuple(Stage.all())
EVEN = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32), np.array([0, 1])

logging.getLogger("flwr").setLevel(logging.CRITICAL)


def samples(client: int, clients: int) -> tuple[np.ndarray, ...]:
    """Return the samples of a client, and its test samples."""
    return (*EVEN, *EVEN)


class Small(BodyAndHead):
    """A network of seven numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.stage, self.head = nn.Sequential(nn.Linear(2, 1)), slice(0, 1), nn.Linear(1, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.1)


def strategy(method: str) -> ClientAppStrategy:
    """Return the server of two clients."""
    reserve = Reserve.of(*EVEN, np.array([1, 0])) if method == "datasharing" else None
    numbers = {"clients": 2, "cohort": 2, "batch_size": 1, "rounds": 1, "fraction_evaluate": 1.0}
    known = create(method, **LITTLE.get(method, {}))
    return flower.strategy(known, model=Small(), test=EVEN, classes=2, reserve=reserve, **numbers)


def arrived(content: bytes) -> RecordDict | None:
    """Return what a message holds, None if Flower cannot read it."""
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(content))
    except Exception:  # Flower's own error; its node or link answers it
        return None


@contextlib.contextmanager
def one_version() -> Iterator[None]:
    """Let messages of the corpus, which name a version, fit every version of the library."""
    with (
        mock.patch.object(versions, "stated", return_value="fuzz"),
        mock.patch.object(versions, "agreed", lambda theirs, them, us: _same_version(theirs)),
    ):
        yield


def _same_version(theirs: object) -> int:
    if theirs != "fuzz":
        raise versions.ProtocolError(f"the version is {theirs!r}")
    return 1


class Foreign(flower.InProcessGrid):
    """Two nodes, of which the first says ``content`` whatever it is asked, if there is one."""

    def __init__(self) -> None:
        super().__init__(flower.client_app(model=Small, data=samples), 2)
        self.content: RecordDict | None = None

    def deliver(self, message: Message) -> list[Message]:
        """Return what comes back for one message."""
        if self.content is not None and message.metadata.dst_node_id == min(self.contexts):
            return [Message(self.content, reply_to=message)]
        return super().deliver(message)


@cache
def began(method: str) -> tuple[ClientAppStrategy, Foreign, RunState]:
    """Return a strategy whose clients have enrolled, its grid, and where it stands."""
    grid, made = Foreign(), strategy(method)
    made.enroll(grid, 3600)
    made.begin(made.initial_arrays(), 1)
    made.prepare(grid)
    return made, grid, copy.deepcopy(made.now)


@cache
def invited() -> tuple[list[Message], Message]:
    """Return the messages of a round, and an honest reply."""
    made, grid, _ = began("scaffold")
    sent = list(made.configure_train(1, made.arrays(), ConfigRecord(), grid))
    return sent, next(reply for reply in grid.send_and_receive(sent) if reply.metadata.src_node_id == 1001)


def served(made: MethodStrategy, hear: Callable[[], object]) -> None:
    """Let a server hear something, and see that nothing is spoilt."""
    made.run_log._unwritten = None
    made.records.clear()
    made.refusals.clear()
    made._void.forget()
    hear()
    assert bool(made.now.w.isfinite().all()), "a reply spoilt the model"


@target
def flower_reply(content: bytes) -> None:
    """A reply to a training message of ``feddpc.flower.strategy``."""
    if (found := arrived(content)) is None:
        return
    made, _, before = began("scaffold")
    sent, honest = invited()
    made.state = copy.deepcopy(before)
    to = next(message for message in sent if message.metadata.dst_node_id == 1000)
    served(made, lambda: made.aggregate_train(1, [Message(found, reply_to=to), honest]))


@cache
def evaluated() -> tuple[list[Message], Message]:
    """Return the messages of an evaluation, and an honest reply."""
    made, grid, _ = began("scaffold")
    sent = list(made.configure_evaluate(1, made.arrays(), ConfigRecord(), grid))
    return sent, next(reply for reply in grid.send_and_receive(sent) if reply.metadata.src_node_id == 1001)


@target
def flower_evaluation(content: bytes) -> None:
    """A reply to ``feddpc.flower.strategy`` with what a client measured."""
    if (found := arrived(content)) is None:
        return
    made, _, _ = began("scaffold")
    made.sent, honest = evaluated()
    to = next(message for message in made.sent if message.metadata.dst_node_id == 1000)
    metrics = made.aggregate_evaluate(1, [Message(found, reply_to=to), honest])
    made.run_log.pending.clear()
    assert metrics is not None, "a reply cost an honest one its place"
    assert set(metrics) <= {"accuracy", "loss"}, "a reply added a metric"
    assert all(np.isfinite(value) for value in metrics.values()), "a reply spoilt a mean"


#: The buffers of a layer that normalizes.
BUFFERS = {"n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2), "n.num_batches_tracked": torch.tensor(0)}


@cache
def plain(buffers: bool) -> tuple[MethodStrategy, RunState, Message]:
    """Return a drop-in strategy before its first round, where it stands, and a message of the round."""
    made, grid = flower.FedDPC(min_available_nodes=2), Foreign()
    made.begin(pack({"w": torch.zeros(3), **(BUFFERS if buffers else {})}), 1)
    made.prepare(grid)
    return made, copy.deepcopy(made.now), Message(RecordDict(), 1000, MessageType.TRAIN, group_id="1")


@target
def flower_plain_reply(content: bytes) -> None:
    """A reply of somebody's own client app to a drop-in strategy, to training and to evaluation."""
    if (found := arrived(content)) is None:
        return
    for buffers in (False, True):
        made, before, sent = plain(buffers)
        made.state, made.sent = copy.deepcopy(before), [sent]
        replies = [Message(found, reply_to=sent)]
        served(made, partial(made.aggregate_train, 1, replies))
        served(made, partial(made.aggregate_evaluate, 1, replies))
        assert buffers == bool(made.buffers)
        if buffers:
            assert bool((made.buffers["n.running_var"].numpy() >= 0).all()), "a reply made a variance negative"


def _greeted(made: ClientAppStrategy, grid: Foreign) -> None:
    made.registry.nodes.clear()
    made.nodes.enroll_nodes(grid, [1000, 1001], {1000, 1001})


def _handed(made: ClientAppStrategy, grid: Foreign) -> None:
    made.registry.ready.clear()
    made.send_payloads(grid)


def _probed(made: ClientAppStrategy, grid: Foreign) -> None:
    made.configure_train(1, made.arrays(), ConfigRecord(), grid)


def _learned(made: ClientAppStrategy, grid: Foreign) -> None:
    made.learn(grid)


#: What a server asks beside training; the first byte of an input chooses.
QUESTIONS: list[tuple[str, Callable[[ClientAppStrategy, Foreign], None]]] = [
    *(("scaffold", _greeted), ("datasharing", _handed), ("fedga", _probed)),
    *((method, _learned) for method in ("fedbr", "gmm", "faug")),
]


@target
def flower_answer(content: bytes) -> None:
    """A reply to a question: who somebody is, what a method must know before round 1, its probe."""
    if not content or (found := arrived(content[1:])) is None:
        return
    method, ask = QUESTIONS[content[0] % len(QUESTIONS)]
    made, grid, before = began(method)
    registry = made.registry
    made.state, grid.content, kept = copy.deepcopy(before), found, copy.deepcopy(registry)
    made.nodes.refused.clear()
    try:
        served(made, lambda: ask(made, grid))
    finally:
        grid.content = None
        vars(registry).update(vars(kept))


@cache
def client() -> ClientApp:
    """Return a client's app."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # who sends, in Flower
    return flower.client_app(model=Small, data=samples)


def context(clients: int = 2) -> Context:
    """Return what a node knows that was never asked."""
    return Context(1, 1000, {"partition-id": 0, "num-partitions": clients}, RecordDict(), {})


@target
def flower_order(content: bytes) -> None:
    """A message of a server to ``feddpc.flower.client_app``: the experiment, and what it is asked to do."""
    if not content or (found := arrived(content[1:])) is None:
        return
    action = ACTIONS[content[0] % len(ACTIONS)]
    app = client()
    reply = app(Message(found, 1000, action, group_id="1"), context())
    told = reply.content[REPLY]
    if REFUSED in told:
        raise FeddpcError(told[REFUSED])


@target
def secure_reply(content: bytes) -> None:
    """A reply in one of the four stages of secure aggregation."""
    if not content or (found := arrived(content[1:])) is None:
        return
    asked = {Key.STAGE: STAGES[content[0] % len(STAGES)]}
    asked |= {Key.ACTIVE_NODE_ID_LIST: [1000, 1001], Key.DEAD_NODE_ID_LIST: [1002]}
    check_reply(ConfigRecord(asked), found, [1, 7, 1, 1])


@cache
def sealed() -> Callable[[Message, Context], Message]:
    """Return the training of a client under secure aggregation."""
    return secure_client.masked_training(client())


@target
def secure_order(content: bytes) -> None:
    """A message of a server to ``feddpc.flower.secure_client_app``, at its two readers; between them are the masks."""
    if (found := arrived(content)) is None:
        return
    train = sealed()
    message = Message(found, 1000, MessageType.TRAIN, group_id="1")
    then = train if SECURE in found else lambda message, _: message
    secure_client.require_min_cohort(3)(message, context(clients=3), then)


@target
def client_memory(content: bytes) -> None:
    """What a client finds on its own disk."""
    memory = Memory(context(), file("memory.safetensors", content))
    memory.recall(create("scaffold"), torch.zeros(7), 1)
