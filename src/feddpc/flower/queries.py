"""Questions to clients beside training: who they are, what a method must know before round 1, and its probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from feddpc._version import __version__
from feddpc.data.batches import BatchPlan
from feddpc.errors import BadInputError
from feddpc.flower.enrolment import Doubt, Roll
from feddpc.flower.orders import Orders
from feddpc.flower.screening import Bounds, Refusal, sift
from feddpc.flower.wire import (
    NO_SETUP,
    ORDERS,
    REPLY,
    SETUP,
    RefusedError,
    arrays_of,
    expect,
    only_record,
    pack,
    tensor,
    unpack,
)
from feddpc.methods.base import Method, State
from feddpc.tasks.base import Task

T = TypeVar("T")
Records = Mapping[str, ArrayRecord | MetricRecord | ConfigRecord]


@dataclass
class Desk:
    """Sends queries and screens the answers; what was refused since somebody last looked is in ``refused``."""

    roll: Roll
    bounds: Bounds
    orders: Orders
    timeout: float | None = None
    refused: list[Refusal] = field(default_factory=list)

    def greet(self, grid: Grid, nodes: list[int], connected: set[int]) -> None:
        """Ask nodes who they are, and write them down."""
        names = {node: i for i, node in enumerate(nodes)}
        contents = {node: RecordDict({ORDERS: self.orders.record()}) for node in nodes}

        def read(i: int, content: RecordDict) -> None:
            client = self.about(content, 0).get("client")
            if type(client) is not int:
                raise RefusedError(f"it says it is client {client!r}")
            self.roll.enter(nodes[i], client, self._size(content), connected)

        before = len(self.refused)
        self._exchange(grid, "hello", contents, names, 0, read)
        told = {refusal.node: refusal.reason for refusal in self.refused[before:]}
        for node in nodes:
            if node not in self.roll.nodes:
                self.roll.doubts[node] = Doubt(told.get(node, "it did not answer"), connected)

    def enrol(self, grid: Grid, wait: float, least: int) -> None:
        """Ask nodes who they are, until ``least`` clients are there or ``wait`` seconds are over; 0 asks once."""
        end = time.monotonic() + wait
        while True:
            connected = set(grid.get_node_ids())
            if new := self.roll.strangers(connected):
                self.greet(grid, new, connected)
            here = len(self.roll.present(np.arange(self.roll.clients), connected))
            if not wait or here >= least:
                return
            if len(connected) >= self.roll.clients or time.monotonic() >= end:
                why = "".join(f"; node {node}: {doubt.reason}" for node, doubt in self.roll.doubts.items())
                raise BadInputError(
                    f"{here} of {least} clients can take part, {len(connected)} nodes are connected{why}: start the "
                    "missing ones, or lower min_available_nodes"
                )
            log(INFO, "waiting for clients: %d of %d", here, least)
            time.sleep(min(1.0, max(end - time.monotonic(), 0.0)))

    def question(self, grid: Grid, name: str, asked: Callable[[int], State]) -> dict[int, State]:
        """Ask every client something before round 1; all must answer."""
        everybody, named = range(self.roll.clients), ConfigRecord({"name": name})
        parts: dict[int, Records] = {c: {"question": named, "asked": pack(asked(c))} for c in everybody}
        answers = self._ask(grid, "learn", parts, 0, lambda told: self._finite(unpack(arrays_of(told, "answer"))))
        if missing := [c for c in everybody if c not in answers]:
            raise BadInputError(
                f"{self.orders.method} asks every client before round 1, but clients {missing} did not answer: start "
                "again when all are there"
            )
        return answers

    def hand(self, grid: Grid, given: Mapping[int, State]) -> None:
        """Give clients what they are handed before their first round; how many samples they have then is noted."""
        contents: dict[int, Records] = {
            c: {"given": pack(state), "stamp": self.stamp()} for c, state in given.items() if state
        }
        sizes = self._ask(grid, "setup", contents, 0, self._size) if contents else {}
        self.roll.sizes |= sizes
        self.roll.given |= contents.keys()
        has_it = {c for c in given if c in sizes or c not in contents}
        self.roll.ready |= {node for node, client in self.roll.nodes.items() if client in has_it}

    def stamp(self) -> ConfigRecord:
        """Return the name of what is handed out, by which a client knows what it has."""
        return ConfigRecord({"stamp": self.orders.tag})

    def content(self, client: int, **records: ArrayRecord | MetricRecord | ConfigRecord) -> RecordDict:
        """Return a message to a client: the experiment, which handout it must have, and ``records``."""
        handout = {SETUP: self.stamp()} if client in self.roll.given else {}
        return RecordDict({ORDERS: self.orders.record(), **handout, **records})

    def lacking(self, refused: list[Refusal]) -> None:
        """Note which nodes say that they do not have what was handed out: they will be given it again."""
        self.roll.ready -= {refusal.node for refusal in refused if NO_SETUP in refusal.reason}

    def prober(self, grid: Grid, action: str, t: int) -> DeskProber:
        """Return what puts the method's probe to clients: each round, or once, as a ``survey``."""
        return DeskProber(self, grid, action, t)

    def about(self, content: RecordDict, t: int) -> ConfigRecord:
        """Return what a reply says about itself, after checking that it belongs to this experiment and round."""
        found = content.get(REPLY)
        if not isinstance(found, ConfigRecord):
            raise RefusedError("it does not come from feddpc.flower.client_app")
        wanted = {"version": __version__, "method": self.orders.method, "round": str(t), "experiment": self.orders.tag}
        for key, value in wanted.items():
            if found.get(key) != value:
                raise RefusedError(f"its {key} is {found.get(key)!r}, not {value!r}")
        return found

    def _ask(
        self,
        grid: Grid,
        action: str,
        parts: Mapping[int, Records],
        t: int,
        read: Callable[[RecordDict], T],
    ) -> dict[int, T]:
        nodes = {client: node for node, client in self.roll.nodes.items()}
        contents = {nodes[c]: self.content(c, **part) for c, part in parts.items() if c in nodes}

        def checked(client: int, content: RecordDict) -> T:
            if self.about(content, t).get("client") != client:
                raise RefusedError(f"it says it is another client than {client}")
            return read(content)

        return self._exchange(grid, action, contents, self.roll.nodes, t, checked)

    def _exchange(
        self,
        grid: Grid,
        action: str,
        contents: Mapping[int, RecordDict],
        clients: Mapping[int, int],
        t: int,
        read: Callable[[int, RecordDict], T],
    ) -> dict[int, T]:
        sent = [Message(content, node, f"query.{action}", group_id=str(t)) for node, content in contents.items()]
        good, refused = sift(grid.send_and_receive(sent, timeout=self.timeout), sent, clients, t, read)
        self.refused += refused
        self.lacking(refused)
        return good

    def _size(self, content: RecordDict) -> int:
        return self.bounds.examples(only_record(content, MetricRecord).get("num-examples"))

    def _finite(self, state: State) -> State:
        for key, value in state.items():
            self.bounds.check(key, value)
        return state


@dataclass(frozen=True)
class DeskProber:
    """Asks clients by messages; NaN stands for the answer of one that gave none, and is screened as such."""

    desk: Desk
    grid: Grid
    action: str
    t: int

    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Return the answers of the plan's clients, stacked."""
        looks, arrays = method.probe(task, w, []), pack({"w": w})

        def read(content: RecordDict) -> State:
            answer = arrays_of(content, "answer")
            expect(answer, looks, "the answer")
            return self.desk._finite({key: tensor(answer[key], key, look) for key, look in looks.items()})

        parts = {int(c): {"arrays": arrays} for c in plan.clients}
        answers = self.desk._ask(self.grid, self.action, parts, self.t, read)
        none = {key: torch.full_like(look, torch.nan) for key, look in looks.items()}
        return {key: torch.stack([answers.get(int(c), none)[key] for c in plan.clients]) for key in looks}
