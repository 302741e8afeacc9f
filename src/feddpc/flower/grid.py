"""A Grid in one process: real messages, serialised on their way, to client apps that run one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict, UserConfigValue
from flwr.app.message.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from feddpc.flower.wire import arrays_of

SERVER = 1  #: the node id of a server in Flower
CRASHED = 2  #: Flower's code for an exception in a client app

UserConfig = Mapping[str, UserConfigValue]


class InProcessGrid(Grid):
    """Runs ``app`` for ``nodes`` nodes in this process, for tests and for trying things out.

    Every message is turned into bytes and back, in both directions: what arrives is what a network would bring.
    An exception in the app becomes an error reply, as in a deployment. ``deliver`` is what happens to one message;
    a subclass may lose it, delay it or answer twice.

    Args:
        app: the client app of all nodes, or one for each.
        nodes: how many there are; node ``i`` has the partition id ``i``.
        run_config: what the apps find in ``context.run_config``.
        node_config: what they find in ``context.node_config`` beside ``partition-id`` and ``num-partitions``.
        one_by_one: let a node work only when its reply is asked for, so that a server that takes replies as they come
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
        arrived = carried(message)
        try:
            reply = self.apps[context.node_id](arrived, context)
        except Exception as error:
            reply = Message(Error(CRASHED, f"{type(error).__name__}: {error}"), reply_to=arrived)
        return [carried(reply)]


def carried(message: Message) -> Message:
    """Return a message as it arrives: through bytes, with nothing shared between sender and receiver.

    The numbers of arrays are bytes already, which nobody can change: they are taken out for the way, since copying
    them there and back is all that would take time.
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
