"""The clients of a run: which node is which client, and the queries that a server sends besides training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.flower import versions
from feddpc.flower.messages import (
    NO_SETUP,
    REPLY,
    SETUP,
    SPEC,
    ExperimentSpec,
    RefusedError,
    arrays_of,
    only_record,
    pack,
    read_arrays,
    unpack,
)
from feddpc.flower.method_traits import probe_template
from feddpc.flower.screening import Bounds, Refusal, listed, screen_replies
from feddpc.methods.base import Method, State

T = TypeVar("T")
Ints = NDArray[np.int64]
Record = ArrayRecord | MetricRecord | ConfigRecord
#: A node that could not be enrolled is asked again when nodes have joined or left, or after so many rounds. A node that
#: hangs costs the whole deadline each time.
RETRY_AFTER = 10
#: Seconds between two looks for clients that the server waits for.
PAUSE = 1.0


@dataclass
class FailedEnrollment:
    """Why a node could not be enrolled, which nodes were connected then, and how many rounds it has not been asked."""

    reason: str
    connected: set[int]
    skipped: int = 0


@dataclass
class ClientRegistry:
    """Which node is which client, and how many samples each client has. Nodes join and leave, clients stay."""

    clients: int
    nodes: dict[int, int] = field(default_factory=dict)  #: client of each node
    sizes: dict[int, int] = field(default_factory=dict)  #: number of samples per client
    ready: set[int] = field(default_factory=set)  #: nodes that have their one-time payload
    with_payload: set[int] = field(default_factory=set)  #: clients that get a one-time payload
    failed: dict[int, FailedEnrollment] = field(default_factory=dict)  #: nodes that cannot take part yet

    def nodes_to_enroll(self, connected: set[int]) -> list[int]:
        """Return the nodes to ask which client they are: new ones, and failed ones that are due for a retry."""
        for failure in self.failed.values():
            failure.skipped = RETRY_AFTER if failure.connected != connected else failure.skipped + 1
        not_yet = {node for node, failure in self.failed.items() if failure.skipped < RETRY_AFTER}
        return sorted(connected - self.nodes.keys() - not_yet)

    def register(self, node: int, client: int, size: int, connected: set[int]) -> None:
        """Register a node; a client has one node, and gets a new one only after the old one has left."""
        if not 0 <= client < self.clients:
            raise RefusedError(f"it says it is client {client}, but there are {self.clients}, counted from 0")
        before = self.node_of().get(client)
        if before is not None and before != node:
            if before in connected:
                raise RefusedError(f"it says it is client {client}, but that is node {before}: give each its own id")
            del self.nodes[before]
        self.nodes[node], self.sizes[client] = client, size
        self.failed.pop(node, None)

    def node_of(self) -> dict[int, int]:
        """Return the node of every client."""
        return {client: node for node, client in self.nodes.items()}

    def connected_clients(self, clients: Ints, connected: set[int]) -> Ints:
        """Return those of ``clients`` whose nodes are ``connected``."""
        present = {client for node, client in self.nodes.items() if node in connected}
        return np.array([c for c in clients if int(c) in present], dtype=np.int64)

    def sample_counts(self) -> Ints:
        """Return the number of samples per client, 0 where it is unknown."""
        return np.array([self.sizes.get(c, 0) for c in range(self.clients)], dtype=np.int64)


@dataclass
class NodeClient:
    """The server's side of queries: sends them, screens the answers, and collects ``refused`` answers per round."""

    registry: ClientRegistry
    bounds: Bounds
    spec: ExperimentSpec
    timeout: float | None = None
    refused: list[Refusal] = field(default_factory=list)

    def enroll(self, grid: Grid, wait: float, least: int) -> None:
        """Enroll nodes until ``least`` clients are connected or ``wait`` seconds are over; 0 asks once."""
        end, logged = time.monotonic() + wait, ""
        while True:
            connected = set(grid.get_node_ids())
            if new := self.registry.nodes_to_enroll(connected):
                self.enroll_nodes(grid, new, connected)
            every = np.arange(self.registry.clients)
            present = self.registry.connected_clients(every, connected)
            if not wait or len(present) >= least:
                return
            there = f"{len(present)} of {least} clients can take part (no node: {listed(np.setdiff1d(every, present))})"
            if len(connected) >= self.registry.clients or time.monotonic() >= end:
                why = "".join(f"; node {node}: {failure.reason}" for node, failure in self.registry.failed.items())
                raise BadInputError(
                    f"{there}, {len(connected)} nodes are connected{why}: start the missing ones, or lower "
                    "min_available_nodes"
                )
            if logged != there:
                log(INFO, "waiting for clients: %s. Start the missing ones, or lower min_available_nodes", there)
                logged = there
            time.sleep(min(PAUSE, max(end - time.monotonic(), 0.0)))

    def enroll_nodes(self, grid: Grid, nodes: list[int], connected: set[int]) -> None:
        """Ask nodes which clients they are, and register them."""

        def read(node: int, content: RecordDict) -> None:
            client = self.header(content, 0).get("client")
            if type(client) is not int:
                raise RefusedError(f"it says it is client {client!r}")
            self.registry.register(node, client, self._size(content), connected)

        sent = [Message(RecordDict({SPEC: self.spec.record()}), node, "query.hello", group_id="0") for node in nodes]
        replies = grid.send_and_receive(sent, timeout=self.timeout)
        _, refused = screen_replies(replies, sent, None, 0, read)
        self.refused += refused
        reasons = {refusal.node: refusal.reason for refusal in refused}
        for node in nodes:
            if node not in self.registry.nodes:
                self.registry.failed[node] = FailedEnrollment(reasons.get(node, "it did not answer"), connected)

    def question(self, grid: Grid, name: str, asked: Callable[[int], State]) -> dict[int, State]:
        """Ask every client something before round 1; all must answer."""
        clients, named = range(self.registry.clients), ConfigRecord({"name": name})
        parts: dict[int, Mapping[str, Record]] = {c: {"question": named, "asked": pack(asked(c))} for c in clients}

        def read(_: int, content: RecordDict) -> State:
            return self.bounds.checked(unpack(arrays_of(content, "answer")))

        answers = self._ask(grid, "learn", parts, 0, read)
        if missing := [c for c in clients if c not in answers]:
            raise BadInputError(
                f"{self.spec.config.method} asks every client before round 1, but clients {missing} did not answer: "
                "start again when all are there"
            )
        return answers

    def send_payloads(self, grid: Grid, payloads: Mapping[int, State]) -> None:
        """Send clients their one-time payload; the registry notes how many samples they have with it."""
        registry = self.registry
        parts: dict[int, Mapping[str, Record]] = {
            c: {"given": pack(payload), "stamp": self._stamp()} for c, payload in payloads.items() if payload
        }
        sizes = self._ask(grid, "setup", parts, 0, lambda _, content: self._size(content)) if parts else {}
        registry.sizes |= sizes
        registry.with_payload |= parts.keys()
        ready = {c for c in payloads if c in sizes or c not in parts}
        registry.ready |= {node for node, client in registry.nodes.items() if client in ready}

    def prober(self, grid: Grid, method: Method, w: Tensor, action: str, t: int) -> Callable[[Ints], State]:
        """Return a function that sends the method's probe to clients; NaN stands for an answer that is missing."""
        templates, arrays = probe_template(method, w), pack({"w": w})
        missing = {key: torch.full_like(like, torch.nan) for key, like in templates.items()}

        def read(_: int, content: RecordDict) -> State:
            return self.bounds.checked(read_arrays(content, "answer", templates))

        def ask(ids: Ints) -> State:
            answers = self._ask(grid, action, {int(c): {"arrays": arrays} for c in ids}, t, read)
            return {key: torch.stack([answers.get(int(c), missing)[key] for c in ids]) for key in templates}

        return ask

    def messages(self, kind: str, parts: Mapping[int, Mapping[str, Record]], t: int) -> list[Message]:
        """Return one message per client with the experiment, which one-time payload it must have, and its records."""
        messages, node_of = [], self.registry.node_of()
        for client, records in parts.items():
            setup = {SETUP: self._stamp()} if client in self.registry.with_payload else {}
            content = RecordDict({SPEC: self.spec.record(), **setup, **records})
            if client in node_of:
                messages.append(Message(content, node_of[client], kind, group_id=str(t)))
        return messages

    def screen(
        self, replies: Iterable[Message], sent: list[Message], t: int, read: Callable[[int, RecordDict], T]
    ) -> dict[int, T]:
        """Return what ``read`` returns for usable replies of this experiment and round; collect the refused ones.

        A node that says that it does not have its one-time payload will get it again.
        """

        def check_and_read(client: int, content: RecordDict) -> T:
            if self.header(content, t).get("client") != client:
                raise RefusedError(f"it says it is another client than {client}")
            return read(client, content)

        good, refused = screen_replies(replies, sent, self.registry.nodes, t, check_and_read)
        self.refused += refused
        self.registry.ready -= {refusal.node for refusal in refused if NO_SETUP in refusal.reason}
        return good

    def header(self, content: RecordDict, t: int) -> ConfigRecord:
        """Return a reply's header, after checking that the reply belongs to this experiment and round."""
        record = content.get(REPLY)
        if not isinstance(record, ConfigRecord):
            raise RefusedError("it does not come from feddpc.flower.client_app")
        try:
            versions.agreed(record.get("version"), "this node", "the server")
        except versions.ProtocolError as error:
            raise RefusedError(str(error)) from None
        wanted = {
            "method": self.spec.config.method,
            "round": str(t),
            "experiment": self.spec.tag,
        }
        for key, value in wanted.items():
            if record.get(key) != value:
                raise RefusedError(f"its {key} is {record.get(key)!r}, not {value!r}")
        return record

    def _stamp(self) -> ConfigRecord:
        """Return the name of a one-time payload, by which a client knows whether it has the right one."""
        return ConfigRecord({"stamp": self.spec.tag})

    def _ask(
        self,
        grid: Grid,
        action: str,
        parts: Mapping[int, Mapping[str, Record]],
        t: int,
        read: Callable[[int, RecordDict], T],
    ) -> dict[int, T]:
        sent = self.messages(f"query.{action}", parts, t)
        return self.screen(grid.send_and_receive(sent, timeout=self.timeout), sent, t, read)

    def _size(self, content: RecordDict) -> int:
        return self.bounds.examples(only_record(content, MetricRecord).get("num-examples"))
