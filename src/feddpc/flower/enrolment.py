"""Who is who: nodes come and go, clients stay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feddpc.flower.wire import RefusedError

#: A node that cannot be enrolled is asked again when nodes have come or gone, else when so many rounds are over: one
#: that hangs costs the whole deadline.
PATIENCE = 10


@dataclass
class Doubt:
    """Why a node could not be enrolled, who was connected then, and how often it has been passed over since."""

    reason: str
    connected: set[int]
    passed: int = 0


@dataclass
class Roll:
    """Which node is which client, and how many samples each client has."""

    clients: int
    nodes: dict[int, int] = field(default_factory=dict)  #: client of a node
    sizes: dict[int, int] = field(default_factory=dict)  #: samples of a client
    ready: set[int] = field(default_factory=set)  #: nodes that have what the server hands out
    given: set[int] = field(default_factory=set)  #: clients that it hands something to
    doubts: dict[int, Doubt] = field(default_factory=dict)  #: nodes that cannot take part yet

    def strangers(self, connected: set[int]) -> list[int]:
        """Return the nodes to ask who they are: those that are new, and those worth another try."""
        for doubt in self.doubts.values():
            doubt.passed = PATIENCE if doubt.connected != connected else doubt.passed + 1
        hopeless = {node for node, doubt in self.doubts.items() if doubt.passed < PATIENCE}
        return sorted(connected - self.nodes.keys() - hopeless)

    def enter(self, node: int, client: int, size: int, connected: set[int]) -> None:
        """Write a node down; a client has one node, and a new one may only follow one that has left."""
        if not 0 <= client < self.clients:
            raise RefusedError(f"it says it is client {client}, but there are {self.clients}, counted from 0")
        before = self.node(client)
        if before is not None and before != node:
            if before in connected:
                raise RefusedError(f"it says it is client {client}, but that is node {before}: give each its own id")
            del self.nodes[before]
        self.nodes[node], self.sizes[client] = client, size
        self.doubts.pop(node, None)

    def node(self, client: int) -> int | None:
        """Return the node of a client."""
        return next((node for node, who in self.nodes.items() if who == client), None)

    def present(self, clients: NDArray[np.int64], connected: set[int]) -> NDArray[np.int64]:
        """Return those of ``clients`` whose nodes are among those ``connected``."""
        here = {client for node, client in self.nodes.items() if node in connected}
        return np.array([c for c in clients if int(c) in here], dtype=np.int64)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of samples of every client, 0 where it is unknown."""
        return np.array([self.sizes.get(c, 0) for c in range(self.clients)], dtype=np.int64)
