"""Fault injection over Flower: replies are changed on their way, as faulty or hostile nodes would have sent them.

The faults, who has them and when, are those of the simulator (``feddpc.robust.faults``), so the numbers are too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.flower.buffers import find_buffers
from feddpc.flower.wire import Layout, RefusedError, only_record, pack
from feddpc.methods.base import State
from feddpc.robust import faults
from feddpc.robust.faults import Faults

#: How what a client sends is taken out of a reply, and put back.
Open = Callable[[RecordDict], State]
Close = Callable[[RecordDict, State], None]


class Changed(NamedTuple):
    """What attackers remember now, and who did what."""

    memory: State
    who: dict[str, list[int]]


def tamper(
    injected: Faults,
    t: int,
    replies: Iterable[Message],
    clients: Mapping[int, int],
    memory: State,
    opened: Open,
    closed: Close,
) -> Changed:
    """Change the replies of clients that misbehave in round ``t``; one that cannot be read is left as it is."""
    sent: dict[int, tuple[RecordDict, State]] = {}
    for reply in replies:
        client = clients.get(reply.metadata.src_node_id)
        if client is None or client in sent or not reply.has_content():
            continue
        try:
            sent[client] = reply.content, opened(reply.content)
        except RefusedError:
            continue
    if not sent:
        return Changed(memory, {})
    ids = np.array(sorted(sent), dtype=np.int64)
    honest = [sent[client][1] for client in ids.tolist()]
    up = {key: torch.stack([state[key] for state in honest]) for key in honest[0]}
    new, memory, who = injected.tamper(t, ids, up, memory)
    for row, client in enumerate(ids.tolist()):
        if any(client in members for members in who.values()):
            closed(sent[client][0], {key: stack[row] for key, stack in new.items()})
    return Changed(memory, who)


def replace_uploads(content: RecordDict, state: State) -> None:
    """Put into a reply what a client of :func:`feddpc.flower.client_app` sends."""
    content["up"] = pack(state)


class FaultyGrid(Grid):
    """A grid on which a share of the nodes misbehaves, for any strategy whose clients return weights, Flower's own too.

    Replies to training messages are changed before the strategy sees them; stragglers are never asked. Everything else
    goes through to ``grid``. Nodes are numbered in the order of their ids, those that come later behind.

    Args:
        grid: the grid that works.
        shares: faults and their shares, as in ``feddpc run --set faults.sign_flip=0.2``.
        nodes: how many nodes there are, of which the shares are taken.
        seed: who misbehaves, and what is drawn.
    """

    def __init__(self, grid: Grid, shares: Mapping[str, Any], *, nodes: int, seed: int = 0) -> None:
        injected = faults.make(shares, population=nodes, seed=seed)
        if injected is None:
            raise BadInputError("no fault has a share: give one, such as {'sign_flip': 0.2}")
        self.grid, self.injected = grid, injected
        self.who: list[dict[str, list[int]]] = []  #: who did what, by round
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
        w = self._see(layout.vector(model))
        t = len(self.who) + 1
        self._number([m.metadata.dst_node_id for m in training])
        late = self._late(t, [m.metadata.dst_node_id for m in training])
        on_time = [m for m in messages if m.metadata.dst_node_id not in late]
        replies = list(self.grid.send_and_receive(on_time, timeout=timeout))

        def opened(content: RecordDict) -> State:
            return {"delta": layout.update(w, only_record(content, ArrayRecord))}

        def closed(content: RecordDict, state: State) -> None:
            key, sent = next((k, record) for k, record in content.items() if isinstance(record, ArrayRecord))
            content[key] = layout.record(w - state["delta"], {n: sent[n] for n in layout.buffers if n in sent})

        changed = tamper(self.injected, t, replies, self._clients, self._memory, opened, closed)
        self._memory = changed.memory
        stragglers = {"straggler": sorted(self._clients[node] for node in late)} if late else {}
        self.who.append(stragglers | changed.who)
        return replies

    def _see(self, w: Tensor) -> Tensor:
        """Remember the model; two in a row tell attackers the global update."""
        if self._model is not None:
            self._memory = self.injected.saw(self._model - w, self._memory)
        self._model = w
        return w

    def _number(self, nodes: Iterable[int]) -> None:
        for node in sorted({*nodes, *self.grid.get_node_ids()} - self._clients.keys()):
            self._clients[node] = len(self._clients)

    def _late(self, t: int, nodes: list[int]) -> set[int]:
        ids = np.array([self._clients[node] for node in nodes], dtype=np.int64)
        return {node for node, late in zip(nodes, self.injected.late(t, ids), strict=True) if late}

    # The rest is the grid's own.

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes' ids."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, unchanged."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies, unchanged."""
        return self.grid.pull_messages(message_ids)
