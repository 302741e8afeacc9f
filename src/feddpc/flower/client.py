"""The client app for any method: the method's client half, on this node's own samples."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import Tensor, nn

from feddpc.data import Dataset
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError, FeddpcError
from feddpc.flower import versions
from feddpc.flower.messages import (
    NO_SETUP,
    REFUSED,
    REPLY,
    SETUP,
    SPEC,
    ExperimentSpec,
    RefusedError,
    arrays_of,
    pack,
    read_arrays,
    unpack,
)
from feddpc.flower.node import Memory, Node, build_node
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import require_asking
from feddpc.task_parts import TaskParts, load_code

#: ``data(client, clients)`` returns the samples and labels of one client, and its test samples and labels if any.
Data = Callable[[int, int], tuple[Any, ...]]
Model = nn.Module | Callable[[], nn.Module]
#: Bytes of nodes' data and networks that a process keeps between messages; in a simulation one process runs many nodes.
KEPT = 2**30
#: Errors that tensors of a wrong shape, type or size cause in a method's hooks or in torch.
DOES_NOT_FIT = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
#: Names of records in a node's ``Context.state``.
GIVEN, STAMP, PROBED = "feddpc.given", "feddpc.stamp", "feddpc.probed"


def client_app(
    *,
    model: Model,
    data: Data,
    method: Method | None = None,
    folder: str | Path | None = None,
    device: str = "cpu",
    task: Any = None,
    loss: Any = None,
    transform: Any = None,
    metrics: Any = None,
) -> ClientApp:
    """Return a client app that answers any strategy of :func:`feddpc.flower.strategy`.

    Args:
        model: the network, or a function that makes one; its weights do not matter, they come from the server.
        data: ``data(client, clients)`` returns ``(x, y)`` or ``(x, y, x_test, y_test)`` of this node. Which client it
            is comes from the node's configuration: ``--node-config "partition-id=0 num-partitions=10"``.
        method: the only method this node takes part in; by default any registered one that the server names.
        folder: where this node keeps what it remembers, so that it survives a restart; by default it does not.
        device: where it trains.
        task: a task of your own, which the server must be given too; by default any of the library that it names. A
            class, or ``FILE.py:NAME``. The same holds for the next three.
        loss: a loss of your own: a function of outputs and targets that returns one value per sample or token.
        transform: a function that changes the inputs of training batches.
        metrics: what is measured on test samples of this node: names and functions of outputs and targets.
    """
    given = {"task": task, "loss": loss, "transform": transform, "metrics": metrics}
    given = {name: part for name, part in given.items() if part is not None}
    load_code(given)
    own, words = TaskParts.take(given)
    pool = _NodePool(model, data, method, Path(folder) if folder is not None else None, device, own, given | words)
    app = ClientApp()
    for action in ("hello", "learn", "setup"):
        app.query(action)(_handler(pool, getattr(pool, action), bare=True))
    for action in ("survey", "probe"):
        app.query(action)(_handler(pool, getattr(pool, action)))
    app.train()(_handler(pool, pool.train))
    app.evaluate()(_handler(pool, pool.evaluate))
    return app


Answer = dict[str, Any]


def _handler(
    pool: _NodePool, work: Callable[[Node, RecordDict, Context], Answer], *, bare: bool = False
) -> Callable[[Message, Context], Message]:
    """Return a message handler: it reads the experiment, does the work, and reports errors in the reply's header."""

    def answer(message: Message, context: Context) -> Message:
        content = message.content
        about = ConfigRecord({"version": versions.stated(), "round": message.metadata.group_id})
        records: Answer = {}
        try:
            spec = pool.read_spec(content)
            if not bare:
                _check_payload(content, context)
            node = pool.node(spec, context, bare=bare)
            records = work(node, content, context)
            about.update({"experiment": spec.tag, "method": spec.config.method, "client": node.client})
        except FeddpcError as error:
            about[REFUSED] = str(error)
        except DOES_NOT_FIT as error:
            log(WARNING, "this node cannot do what message %s asks for", message.metadata.message_type, exc_info=True)
            about[REFUSED] = f"this node cannot do what it is asked for: {type(error).__name__}: {str(error)[:500]}"
        return Message(RecordDict({REPLY: about, **records}), reply_to=message)

    return answer


@dataclass
class _NodePool:
    """The nodes that this process runs, and their answers to messages."""

    model: Model
    data: Data
    method: Method | None
    folder: Path | None
    device: str
    own: TaskParts  #: code of the user's own
    words: Mapping[str, str]  #: what descriptions call it
    nodes: OrderedDict[tuple[int, int], tuple[str, Node]] = field(default_factory=OrderedDict)
    spec: ExperimentSpec | None = None  #: of the last message

    def read_spec(self, content: RecordDict) -> ExperimentSpec:
        """Return the experiment of a message, which is read and checked once as long as it stays the same."""
        if self.spec is None or content.get(SPEC) != self.spec.record():
            self.spec = ExperimentSpec.read(content)
        return self.spec

    def node(self, spec: ExperimentSpec, context: Context, *, bare: bool = False) -> Node:
        """Return the node of ``context``, a new one if the experiment changed; ``bare``: without one-time payload."""
        given, stamp = arrays_of(context.state, GIVEN), context.state.get(STAMP)
        if bare:
            given, stamp = ArrayRecord(), None
        key, made_for = (context.run_id, context.node_id), f"{spec.tag} {stamp['stamp']!s}" if stamp else spec.tag
        if key in self.nodes and self.nodes[key][0] == made_for:
            self.nodes.move_to_end(key)
            return self.nodes[key][1]
        spec.check_code(self.words)
        client, clients = self._identify(context, spec)
        samples = self._samples(client, clients, spec)
        module = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        method = spec.build(self.method)
        node = build_node(spec, method, client, samples, module, unpack(given), self.own, self.device)
        self.nodes[key] = made_for, node
        while len(self.nodes) > 1 and sum(kept.size for _, kept in self.nodes.values()) > KEPT:
            self.nodes.popitem(last=False)
        return node

    # The messages.

    def hello(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Say which client this node is and how many samples it has."""
        return {"metrics": MetricRecord({"num-examples": node.samples})}

    def learn(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer a question that comes before round 1."""
        question, asked = str(_values(content, "question").get("name")), unpack(arrays_of(content, "asked"))
        method = require_asking(node.method, node.method.name)
        return {"answer": pack(method.answer(question, node.client, node.world, asked))}

    def setup(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Store the one-time payload, and say how many samples this node has with it."""
        context.state[GIVEN] = arrays_of(content, "given")
        context.state[STAMP] = _values(content, "stamp")
        return self.hello(self.node(node.spec, context), content, context)

    def survey(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer the probe once, before round 1, and remember what the method makes of the answer."""
        answers = self._answer_probe(node, self._weights(node, content))
        self._memory(node, context).hold(0, _single(node.method.client_state_from_probe(answers)))
        return {"answer": pack(_single(answers))}

    def probe(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Answer the probe, and keep the answer for this round."""
        context.state[PROBED] = pack(_single(self._answer_probe(node, self._weights(node, content))))
        return {"answer": context.state[PROBED]}

    def train(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Train, send what the method sends, and hold what it will remember."""
        order = _values(content, "round")
        t, lr, accepted = (order.get(name) for name in ("round", "lr", "accepted"))
        if not (isinstance(t, int) and isinstance(lr, float) and isinstance(accepted, int)):
            raise RefusedError(f"the message has round = {t!r}, lr = {lr!r} and accepted = {accepted!r}")
        w = self._weights(node, content)
        down = unpack(arrays_of(content, "down"), self.device)
        memory = self._memory(node, context)
        own = memory.recall(node.method, w, accepted)
        probed = self._probed(node, w, bool(order.get("asked")), context)
        plan = node.planner.plan(t, node.ids).resting(np.array([bool(order.get("rest"))]))
        stacked = {k: v[None] for k, v in (own | probed).items()}
        trained = Loop().train(node.local, node.task, w, down | node.payload, stacked, plan, lr)
        _check_finite(trained.uploads, trained.memory, {"loss": trained.loss})
        memory.hold(t, _single(trained.memory))
        metrics = MetricRecord({"num-examples": node.samples, "loss": float(trained.loss[0])})
        return {"up": pack(_single(trained.uploads)), "metrics": metrics}

    def evaluate(self, node: Node, content: RecordDict, context: Context) -> Answer:
        """Evaluate the model on this node's own test samples; a metric that they do not define is left out."""
        if not len(node.world.data.y_test):
            raise BadInputError("this node has no test samples: let data() return (x, y, x_test, y_test)")
        w = self._weights(node, content)
        count = len(node.world.data.y_test)
        metrics = {name: value for name, value in node.task.evaluate(w).items() if math.isfinite(value)}
        return {"metrics": MetricRecord({"num-examples": count, **metrics})}

    # Helpers.

    def _answer_probe(self, node: Node, w: Tensor) -> State:
        answers = Loop().probe(node.method, node.task, w, node.planner.sweep(node.ids))
        _check_finite(answers)
        return answers

    def _weights(self, node: Node, content: RecordDict) -> torch.Tensor:
        """Return the model of a message, which must fit this node's network."""
        return read_arrays(content, "arrays", {"w": node.task.initial().cpu()})["w"].to(self.device)

    def _probed(self, node: Node, w: torch.Tensor, asked: bool, context: Context) -> State:
        """Return this round's answer to the probe: the one that was sent, or one that stays at this node."""
        method = node.method
        if not method.probes:
            return {}
        if method.reports:
            return unpack(arrays_of(context.state, PROBED), self.device)
        if not asked:
            return method.default_probe(w)
        return _single(self._answer_probe(node, w))

    def _memory(self, node: Node, context: Context) -> Memory:
        name = f"{node.spec.tag}-client-{node.client}.safetensors"
        return Memory(context, None if self.folder is None else self.folder / name)

    def _identify(self, context: Context, spec: ExperimentSpec) -> tuple[int, int]:
        numbers = [context.node_config.get(name) for name in ("partition-id", "num-partitions")]
        if not all(type(value) is int for value in numbers):
            raise RefusedError(
                'this node does not know which client it is: start it with --node-config "partition-id=0 '
                f'num-partitions={spec.config.clients}"'
            )
        client, clients = int(numbers[0]), int(numbers[1])  # type: ignore[arg-type]
        if clients != spec.config.clients or not 0 <= client < clients:
            raise RefusedError(
                f"this node is client {client} of {clients}, but the experiment has {spec.config.clients} clients, "
                "counted from 0: correct partition-id and num-partitions in its --node-config"
            )
        return client, clients

    def _samples(self, client: int, clients: int, spec: ExperimentSpec) -> Dataset:
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
        known: dict[str, Any] = {"classes": spec.classes, "target": spec.target, "name": "node"}
        dataset = Dataset.from_arrays(x, y, *(test or (x[:1], y[:1])), **known)
        return dataset if test else dataclasses.replace(dataset, x_test=dataset.x_test[:0], y_test=dataset.y_test[:0])


def _check_payload(content: RecordDict, context: Context) -> None:
    """Refuse to work without the one-time payload: this node restarted, or never got it."""
    if SETUP in content and dict(_values(content, SETUP)) != dict(context.state.get(STAMP) or {}):
        raise RefusedError(f"{NO_SETUP}: it needs it once more")


def _values(content: RecordDict, key: str) -> ConfigRecord:
    value = content.get(key)
    if not isinstance(value, ConfigRecord):
        raise RefusedError(f"the message has no {key}")
    return value


def _single(stacked: State) -> State:
    """Return the rows of the only client in a stack."""
    return {key: rows[0] for key, rows in stacked.items()}


def _check_finite(*states: State) -> None:
    """Refuse to send or remember a number that is not finite."""
    if not all(bool(value.isfinite().all()) for state in states for value in state.values()):
        raise RefusedError("training gave numbers that are not finite: lower the rate")
