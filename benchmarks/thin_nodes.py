"""Many nodes in one process, for loads that real SuperNodes are too heavy for: each is a thread with a key of its own.

    python benchmarks/thin_nodes.py --server 127.0.0.1:8000 --app FOLDER --nodes 0,1,2 --of 50 --folder FOLDER \
        [--hang 0.02 --lie 0.04 --crash 0.02 --leave 0.02]

They speak Flower's Fleet API and run the app's own client half, without the process per message that a SuperNode
starts. The shares say how often a node, asked to train, answers after the deadline, answers nonsense, falls silent
without a word and comes back (keeping its key), or takes its leave and comes back. Node keys are made from the nodes'
numbers, so that a process started again has the same nodes: never do that outside a test. Uses private parts of Flower.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_protobuf_utils as wire
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

#: Seconds between two looks for messages, as a SuperNode does, and between two signs of life.
LOOK, HEARTBEAT = 3.0, 30.0
#: One node at a time works: they share the two cores anyway, and Flower's message objects have global state.
WORKING = threading.Lock()
KINDS = ("hang", "lie", "crash", "leave")


class Retrying:
    """A client of the Fleet API that repeats failed calls as a SuperNode does: no connection, no answer, 502 to 504."""

    def __init__(self, client: FleetHttpClient) -> None:
        self.client, self.invoker = client, make_simple_http_retry_invoker()

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self.invoker.invoke, getattr(self.client, name))


class ThinNode(threading.Thread):
    """One node: looks for messages, answers them, and misbehaves as often as it is told."""

    def __init__(self, number: int, given: argparse.Namespace, app: Any) -> None:
        super().__init__(daemon=True, name=f"node {number}")
        self.number, self.given, self.app = number, given, app
        secret = int.from_bytes(hashlib.sha256(f"thin node {number} {given.folder}".encode()).digest(), "big")
        key = ec.derive_private_key(secret, ec.SECP384R1())
        self.public = public_key_to_bytes(key.public_key())
        link = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ]
        self.client = Retrying(FleetHttpClient.from_server_address(given.server, True, None, interceptors=link))
        self.rng = np.random.default_rng([number, os.getpid()])
        self.node = Node()
        self.seen = 0.0
        self.registered = False
        self.contexts: dict[int, Context] = {}

    def run(self) -> None:
        while True:
            try:
                self._connect()
                while True:
                    self._beat()
                    there = False
                    with suppress(RunNotRunningException):  # no Exception: the run has ended, as a SuperNode ignores
                        there = self._answer_one()
                    if not there:
                        time.sleep(self.given.look)
            except ConnectionError:  # it comes back
                time.sleep(1.0)
            except Exception as error:  # a SuperNode goes on or is started again
                print(f"{self.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                time.sleep(5.0 + 5.0 * self.rng.random())

    def _connect(self) -> None:
        if not self.registered:
            with suppress(httpx.HTTPStatusError):  # it is registered already
                self.client.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=self.public))
            self.registered = True
        ask = fleet_pb2.ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        self.node = Node(node_id=self.client.ActivateNode(ask).node_id)
        self.seen = time.monotonic()

    def _beat(self) -> None:
        if time.monotonic() - self.seen > HEARTBEAT / 2:
            ask = heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
            self.client.SendNodeHeartbeat(ask)
            self.seen = time.monotonic()

    def _answer_one(self) -> bool:
        """Answer a message; return whether there was one."""
        found = self.client.PullMessages(fleet_pb2.PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return False
        (head,), (tree,) = found.messages_list, found.message_object_trees
        run = head.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            wire.make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
            wire.make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        kind = self._mood() if message.metadata.message_type == "train" else "honest"
        if kind == "crash":
            time.sleep(60.0 + 30.0 * self.rng.random())  # without a sign of life: the SuperLink takes it for gone
            raise ConnectionError
        if kind == "leave":
            self.client.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id))
            time.sleep(5.0 + 20.0 * self.rng.random())
            raise ConnectionError
        if kind == "hang":
            time.sleep(self.given.deadline + 5.0)
            self._beat()
        with WORKING:
            reply = self.app(message=message, context=self._context(run))
            if kind == "lie":
                reply = Message(lie(reply.content, self.rng), reply_to=message)
            self._send(reply, run)
        return True

    def _mood(self) -> str:
        shares = [getattr(self.given, kind) for kind in KINDS]
        return str(self.rng.choice([*KINDS, "honest"], p=[*shares, 1 - sum(shares)]))

    def _context(self, run: int) -> Context:
        about = {"partition-id": self.number, "num-partitions": self.given.of}
        state = next(iter(self.contexts.values())).state if self.contexts else RecordDict()
        return self.contexts.setdefault(run, Context(run, self.node.node_id, about, state, {}))

    def _send(self, reply: Message, run: int) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        head = message_to_proto(remove_content_from_message(reply))
        with no_object_id_recompute():
            ask = fleet_pb2.PushMessagesRequest(
                node=self.node,
                messages_list=[head],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.1],
            )
            answer = self.client.PushMessages(ask)
            push = wire.make_push_object_fn_protobuf(self.client.PushObject, self.node, run, answer.session_id)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(answer.objects_to_push))


def lie(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """Return a reply with nonsense in it: not finite, of another shape, of another round, enormous, or nothing."""
    records = dict(content.items())
    key = next(k for k, record in records.items() if isinstance(record, ArrayRecord))
    name, array = next(iter(records[key].items()))
    bad = {
        "nan": np.full_like(array.numpy(), np.nan),
        "shape": np.zeros(1, np.float32),
        "huge": np.full_like(array.numpy(), 1e10),
    }
    kind = str(rng.choice([*bad, "empty", "old", "count"]))
    if kind in bad:
        records[key] = ArrayRecord({**records[key], name: Array(bad[kind])})
    elif kind == "empty":
        return RecordDict()
    else:
        for about, record in list(records.items()):
            if kind == "old" and isinstance(record, ConfigRecord):
                records[about] = ConfigRecord({**record, "round": "0"})
            if kind == "count" and isinstance(record, MetricRecord):
                records[about] = MetricRecord({**record, "num-examples": -1})
    return RecordDict(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--app", type=Path, required=True)
    parser.add_argument("--nodes", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="clients' memories go there")
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--look", type=float, default=LOOK, help="seconds between two looks for messages")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=float, default=0.0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(given.folder)
    sys.path.insert(0, str(given.app.resolve()))
    app = importlib.import_module("federation.client_app").app
    threads = [ThinNode(number, given, app) for number in given.nodes]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
