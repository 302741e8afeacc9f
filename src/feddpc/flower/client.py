"""The client app for any method: its client half, on this node's own samples."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import nn

from feddpc._version import __version__
from feddpc.data import Dataset
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError, FeddpcError
from feddpc.flower import preparing
from feddpc.flower.memory import Memory
from feddpc.flower.node import Node, build
from feddpc.flower.orders import Orders
from feddpc.flower.wire import NO_SETUP, REFUSED, REPLY, SETUP, RefusedError, arrays_of, expect, pack, tensor, unpack
from feddpc.methods.base import Method, State
from feddpc.round.server_step import drop_non_finite

#: ``data(client, clients)`` returns the samples and labels of one client, and its test samples and labels if any.
Data = Callable[[int, int], tuple[Any, ...]]
Model = nn.Module | Callable[[], nn.Module]
#: How many nodes' data and networks a process keeps between messages; a simulation runs many nodes in one.
KEPT = 16
#: What numbers of another shape, kind or size than expected lead to, in the hooks of a method or in torch.
DOES_NOT_FIT = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
GIVEN, STAMP, PROBED = "feddpc.given", "feddpc.stamp", "feddpc.probed"


def client_app(
    *,
    model: Model,
    data: Data,
    method: Method | None = None,
    folder: str | Path | None = None,
    device: str = "cpu",
) -> ClientApp:
    """Return a client app that answers any strategy of :func:`feddpc.flower.strategy`.

    Args:
        model: the network, or a function that makes one; its weights do not matter, they come from the server.
        data: ``data(client, clients)`` returns ``(x, y)`` or ``(x, y, x_test, y_test)`` of this node. Which client it
            is comes from the node's configuration: ``--node-config "partition-id=0 num-partitions=10"``.
        method: the only method this node takes part in; by default any registered one that the server names.
        folder: where this node keeps what it remembers, so that it outlives a restart; by default it does not.
        device: where it trains.
    """
    crew = _Crew(model, data, method, Path(folder) if folder is not None else None, device)
    app = ClientApp()
    for action in ("hello", "learn", "setup"):
        app.query(action)(_answering(crew, getattr(crew, action), bare=True))
    for action in ("survey", "probe"):
        app.query(action)(_answering(crew, getattr(crew, action)))
    app.train()(_answering(crew, crew.train))
    app.evaluate()(_answering(crew, crew.evaluate))
    return app


Answer = dict[str, Any]


def _answering(
    crew: _Crew, work: Callable[[Node, RecordDict, Context], Answer], *, bare: bool = False
) -> Callable[[Message, Context], Message]:
    """Wrap a piece of work: orders are read before, what goes wrong is told in the reply, which says what it is for."""

    def answer(message: Message, context: Context) -> Message:
        content = message.content
        about = ConfigRecord({"version": __version__, "round": message.metadata.group_id})
        records: Answer = {}
        try:
            orders = Orders.read(content)
            if not bare:
                _has_setup(content, context)
            node = crew.node(orders, context, bare=bare)
            records = work(node, content, context)
            about.update({"experiment": orders.tag, "method": orders.method, "client": node.client})
        except FeddpcError as error:
            about[REFUSED] = str(error)
        except DOES_NOT_FIT as error:
            log(WARNING, "this node cannot do what message %s asks for", message.metadata.message_type, exc_info=True)
            about[REFUSED] = f"this node cannot do what it is asked for: {type(error).__name__}: {str(error)[:500]}"
        return Message(RecordDict({REPLY: about, **records}), reply_to=message)

    return answer


@dataclass
class _Crew:
    """The nodes that this process works for."""

    model: Model
    data: Data
    method: Method | None
    folder: Path | None
    device: str
    nodes: OrderedDict[tuple[int, int], tuple[str, Node]] = field(default_factory=OrderedDict)

    def node(self, orders: Orders, context: Context, *, bare: bool = False) -> Node:
        """Return the node of ``context``, made anew if the experiment changed; ``bare``: without what it was given."""
        given, stamp = arrays_of(context.state, GIVEN), context.state.get(STAMP)
        if bare:
            given, stamp = ArrayRecord(), None
        key, made_for = (context.run_id, context.node_id), f"{orders.tag} {stamp['stamp']!s}" if stamp else orders.tag
        if key in self.nodes and self.nodes[key][0] == made_for:
            self.nodes.move_to_end(key)
            return self.nodes[key][1]
        client, clients = self._who(context, orders)
        samples = self._samples(client, clients, orders)
        module = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        node = build(orders, orders.build(self.method), client, samples, module, unpack(given), self.device)
        self.nodes[key] = made_for, node
        while len(self.nodes) > KEPT:
            self.nodes.popitem(last=False)
        return node

    # The messages.

    def hello(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Say who this is and how many samples it has."""
        return {"metrics": MetricRecord({"num-examples": node.samples})}

    def learn(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer a question that comes before round 1."""
        question = str(_values(content, "question").get("name"))
        made = preparing.preparation(node.method).answer(
            node.method, question, node.client, node.world, unpack(arrays_of(content, "asked"))
        )
        return {"answer": pack(made)}

    def setup(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Take what the server hands out before round 1, and say how many samples there are then."""
        context.state[GIVEN] = arrays_of(content, "given")
        context.state[STAMP] = _values(content, "stamp")
        return self.hello(self.node(Orders.read(content), context), content, context)

    def survey(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer the probe once, before round 1, and remember what comes of it."""
        w = self._weights(node, content)
        answers = Loop().probe(node.method, node.task, w, node.planner.sweep(node.ids))
        _finite(node, answers)
        self._memory(node, content, context).hold(
            0, {k: v[0] for k, v in node.method.client_state_from_probe(answers).items()}
        )
        return {"answer": pack({k: v[0] for k, v in answers.items()})}

    def probe(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer the probe, and keep the answer for this round."""
        w = self._weights(node, content)
        answers = Loop().probe(node.method, node.task, w, node.planner.sweep(node.ids))
        _finite(node, answers)
        context.state[PROBED] = pack({k: v[0] for k, v in answers.items()})
        return {"answer": context.state[PROBED]}

    def train(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Train, send what the method sends, and hold what it will remember."""
        told = _values(content, "round")
        t, lr, accepted = (told.get(name) for name in ("round", "lr", "accepted"))
        if not (isinstance(t, int) and isinstance(lr, float) and isinstance(accepted, int)):
            raise RefusedError(f"the message has round = {t!r}, lr = {lr!r} and accepted = {accepted!r}")
        w = self._weights(node, content)
        down = unpack(arrays_of(content, "down"), self.device)
        memory = self._memory(node, content, context)
        own = memory.recall(node.method, w, accepted)
        probed = self._probed(node, w, bool(told.get("asked")), context)
        plan = node.planner.plan(t, node.ids).resting(np.array([bool(told.get("rest"))]))
        stacked = {k: v[None] for k, v in (own | probed).items()}
        trained = Loop().train(node.method, node.task, w, down | node.kit, stacked, plan, lr)
        _finite(node, trained.up, trained.own, {"loss": trained.loss})
        memory.hold(t, {k: v[0] for k, v in trained.own.items()})
        metrics = MetricRecord({"num-examples": node.samples, "loss": float(trained.loss[0])})
        return {"up": pack({k: v[0] for k, v in trained.up.items()}), "metrics": metrics}

    def evaluate(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Say how the model does on this node's own test samples."""
        if not len(node.world.data.y_test):
            raise BadInputError("this node has no test samples: let data() return (x, y, x_test, y_test)")
        w = self._weights(node, content)
        accuracy, loss = node.task.evaluate(w)
        count = len(node.world.data.y_test)
        return {"metrics": MetricRecord({"num-examples": count, "accuracy": accuracy, "loss": loss})}

    # What they need.

    def _weights(self, node: Node, content: RecordDict) -> torch.Tensor:
        """Return the model of a message, which must be one of this node's network."""
        arrays = arrays_of(content, "arrays")
        expect(arrays, ["w"], "the message")
        return tensor(arrays["w"], "w", node.task.initial().cpu()).to(self.device)

    def _probed(self, node: Node, w: torch.Tensor, asked: bool, context: Context) -> State:
        """Return this round's answer to the probe: the one that was sent, or one that stays here."""
        method = node.method
        if not method.probes:
            return {}
        if method.reports:
            return unpack(arrays_of(context.state, PROBED), self.device)
        if not asked:
            return method.default_probe(w)
        answers = Loop().probe(method, node.task, w, node.planner.sweep(node.ids))
        return {k: v[0] for k, v in answers.items()}

    def _memory(self, node: Node, content: RecordDict, context: Context) -> Memory:
        name = f"{Orders.read(content).tag}-client-{node.client}.safetensors"
        return Memory(context, None if self.folder is None else self.folder / name)

    def _who(self, context: Context, orders: Orders) -> tuple[int, int]:
        told = [context.node_config.get(name) for name in ("partition-id", "num-partitions")]
        if not all(type(value) is int for value in told):
            raise RefusedError(
                'this node does not know which client it is: start it with --node-config "partition-id=0 '
                f'num-partitions={orders.clients}"'
            )
        client, clients = int(told[0]), int(told[1])  # type: ignore[arg-type]
        if clients != orders.clients or not 0 <= client < clients:
            raise RefusedError(
                f"this node is client {client} of {clients}, but the experiment has {orders.clients} clients, counted "
                "from 0: correct partition-id and num-partitions in its --node-config"
            )
        return client, clients

    def _samples(self, client: int, clients: int, orders: Orders) -> Dataset:
        try:
            parts = tuple(self.data(client, clients))
        except FeddpcError:
            raise
        except Exception as error:
            raise RefusedError(f"data({client}, {clients}) failed: {type(error).__name__}: {error}") from error
        if len(parts) not in (2, 4) or not len(parts[0]):
            raise RefusedError(
                f"data({client}, {clients}) gave no samples: it must return (x, y) or (x, y, x_test, y_test)"
            )
        x, y, *test = parts
        made = Dataset.from_arrays(x, y, *(test or (x[:1], y[:1])), classes=orders.classes, name="node")
        return (
            made
            if test
            else Dataset(made.name, made.x_train, made.y_train, made.x_test[:0], made.y_test[:0], made.classes)
        )


def _has_setup(content: RecordDict, context: Context) -> None:
    """Refuse to work without what the server handed out: this node restarted, or never got it."""
    if SETUP in content and dict(_values(content, SETUP)) != dict(context.state.get(STAMP) or {}):
        raise RefusedError(f"{NO_SETUP}: it needs it once more")


def _values(content: RecordDict, key: str) -> ConfigRecord:
    found = content.get(key)
    if not isinstance(found, ConfigRecord):
        raise RefusedError(f"the message has no {key}")
    return found


def _finite(node: Node, *states: State) -> None:
    """Refuse to send or remember a number that is not finite."""
    if not len(drop_non_finite(node.ids, *states)[0]):
        raise RefusedError("training gave numbers that are not finite: lower the rate")
