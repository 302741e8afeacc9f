"""A Flower grid in one process, and one on which nodes misbehave: for tests and experiments without a network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict, UserConfigValue
from flwr.app.message.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.flower.layout import Layout, find_buffers
from feddpc.flower.messages import arrays_of, only_record
from feddpc.flower.polling import GridWrapper
from feddpc.flower.simulated_faults import tamper
from feddpc.methods.base import State
from feddpc.robust import faults

SERVER = 1  #: the node id of a server in Flower
CRASHED = 2  #: Flower's code for an exception in a client app

UserConfig = Mapping[str, UserConfigValue]


class InProcessGrid(Grid):
    """Runs ``app`` for ``nodes`` nodes in this process, for tests and experiments.

    Every message is serialized and parsed in both directions, as on a network. An exception in the app becomes an
    error reply, as in a deployment. ``deliver`` handles one message; a subclass may lose it, delay it or answer twice.

    Args:
        app: the client app of all nodes, or one for each.
        nodes: how many there are; node ``i`` has the partition id ``i``.
        run_config: what the apps find in ``context.run_config``.
        node_config: what they find in ``context.node_config`` in addition to ``partition-id`` and ``num-partitions``.
        one_by_one: run a node only when its reply is asked for, so that a server that reads replies one at a time
            never holds two of them.
    """

    def __init__(
        self,
        app: ClientApp | list[ClientApp],
        nodes: int,
        *,
        run_config: UserConfig | None = None,
        node_config: UserConfig | None = None,
        one_by_one: bool = False,
    ) -> None:
        apps = app if isinstance(app, list) else [app] * nodes
        self.one_by_one = one_by_one
        self._run = Run.create_empty(run_id=1)
        self._number = itertools.count(1)
        self._replies: dict[str, list[Message]] = {}
        # Node ids are large numbers in Flower, and no partition ids.
        self.contexts = {
            1000 + i: Context(
                run_id=1,
                node_id=1000 + i,
                node_config={"partition-id": i, "num-partitions": nodes, **(node_config or {})},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(nodes)
        }
        self.apps = dict(zip(self.contexts, apps, strict=True))
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes' ids."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes answer at once; their replies wait to be pulled."""
        ids = []
        for message in messages:
            name = f"message-{next(self._number)}"
            message.metadata.__dict__["_message_id"] = name
            self._replies[name] = self.deliver(message)
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages."""
        return [reply for name in message_ids for reply in self._replies.pop(name, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies; nodes run one after the other until ``timeout`` is over."""
        replies = self._replying(messages, time.monotonic() + (float("inf") if timeout is None else timeout))
        return replies if self.one_by_one else list(replies)

    def _replying(self, messages: Iterable[Message], end: float) -> Iterator[Message]:
        for message in messages:
            came = self.pull_messages(self.push_messages([message]))
            if time.monotonic() >= end:
                return  # it came too late, and so would the others
            yield from came

    def deliver(self, message: Message) -> list[Message]:
        """Return what comes back for one message."""
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return []  # it has left
        arrived = transport(message)
        try:
            reply = self.apps[context.node_id](arrived, context)
        except Exception as error:
            reply = Message(Error(CRASHED, f"{type(error).__name__}: {error}"), reply_to=arrived)
        return [transport(reply)]


def transport(message: Message) -> Message:
    """Return a message as it arrives: serialized and parsed, with nothing shared between sender and receiver.

    Array data are immutable bytes already. They are not copied, since that would take most of the time.
    """
    if not message.has_content():
        return _through_bytes(message)
    numbers: dict[str, dict[str, bytes]] = {}
    light = RecordDict()
    for key, record in message.content.items():
        if isinstance(record, ArrayRecord):
            numbers[key] = {name: array.data for name, array in record.items()}
            light[key] = ArrayRecord({n: Array(a.dtype, tuple(a.shape), a.stype, b"") for n, a in record.items()})
        else:
            light[key] = record
    arrived = _through_bytes(make_message(message.metadata, light))
    for key, parts in numbers.items():
        for name, data in parts.items():
            arrays_of(arrived.content, key)[name].data = data
    return arrived


def _through_bytes(message: Message) -> Message:
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


class FaultyGrid(GridWrapper):
    """A grid on which a share of the nodes misbehaves, for any strategy whose clients return weights, Flower's own too.

    Replies to training messages are changed before the strategy sees them; stragglers are never asked. Everything else
    goes through to ``grid``. Nodes are numbered in the order of their ids; nodes that join later get the next numbers.

    Args:
        grid: the grid that works.
        shares: faults and their shares, as in ``feddpc run --set faults.sign_flip=0.2``.
        nodes: how many nodes there are, of which the shares are taken.
        seed: decides which nodes misbehave, and how.
    """

    def __init__(self, grid: Grid, shares: Mapping[str, Any], *, nodes: int, seed: int = 0) -> None:
        injected = faults.make(shares, population=nodes, seed=seed)
        if injected is None:
            raise BadInputError("no fault has a share: give one, such as {'sign_flip': 0.2}")
        super().__init__(grid)
        self.injected = injected
        self.who: list[dict[str, list[int]]] = []  #: per round, the clients that had each fault
        self._clients: dict[int, int] = {}
        self._memory: State = {}
        self._model: Tensor | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies, some of them changed."""
        messages = list(messages)
        training = [m for m in messages if m.metadata.message_type.startswith(MessageType.TRAIN)]
        if not training:
            return self.grid.send_and_receive(messages, timeout=timeout)
        model = only_record(training[0].content, ArrayRecord)
        layout = Layout(model, find_buffers(model), optional=True)
        w = self._watch(layout.vector(model))
        t = len(self.who) + 1
        self._number([m.metadata.dst_node_id for m in training])
        late = self._stragglers(t, [m.metadata.dst_node_id for m in training])
        on_time = [m for m in messages if m.metadata.dst_node_id not in late]
        replies = list(self.grid.send_and_receive(on_time, timeout=timeout))

        def read(content: RecordDict) -> State:
            return {"delta": layout.update(w, only_record(content, ArrayRecord))}

        def replace(content: RecordDict, state: State) -> None:
            key, sent = next((k, record) for k, record in content.items() if isinstance(record, ArrayRecord))
            content[key] = layout.record(w - state["delta"], {n: sent[n] for n in layout.buffers if n in sent})

        self._memory, who = tamper(self.injected, t, replies, self._clients, self._memory, read, replace)
        stragglers = {"straggler": sorted(self._clients[node] for node in late)} if late else {}
        self.who.append(stragglers | who)
        return replies

    def _watch(self, w: Tensor) -> Tensor:
        """Remember the model; from two in a row, attackers know the global update."""
        if self._model is not None:
            self._memory = self.injected.saw(self._model - w, self._memory)
        self._model = w
        return w

    def _number(self, nodes: Iterable[int]) -> None:
        for node in sorted({*nodes, *self.grid.get_node_ids()} - self._clients.keys()):
            self._clients[node] = len(self._clients)

    def _stragglers(self, t: int, nodes: list[int]) -> set[int]:
        ids = np.array([self._clients[node] for node in nodes], dtype=np.int64)
        return {node for node, late in zip(nodes, self.injected.late(t, ids), strict=True) if late}
