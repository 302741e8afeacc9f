"""Who is who: nodes come and go, clients stay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feddpc.flower.wire import RefusedError


@dataclass
class Roll:
    """Which node is which client, and how many samples each client has."""

    clients: int
    nodes: dict[int, int] = field(default_factory=dict)  #: client of a node
    sizes: dict[int, int] = field(default_factory=dict)  #: samples of a client
    ready: set[int] = field(default_factory=set)  #: nodes that were handed what the server hands out
    refused: dict[int, str] = field(default_factory=dict)  #: nodes that cannot take part, and why

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

    def node(self, client: int) -> int | None:
        """Return the node of a client."""
        return next((node for node, who in self.nodes.items() if who == client), None)

    def present(self, clients: NDArray[np.int64], connected: set[int]) -> NDArray[np.int64]:
        """Return those of ``clients`` that can be reached."""
        here = {client for node, client in self.nodes.items() if node in connected}
        return np.array([c for c in clients if int(c) in here], dtype=np.int64)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of samples of every client, 0 where it is unknown."""
        return np.array([self.sizes.get(c, 0) for c in range(self.clients)], dtype=np.int64)
