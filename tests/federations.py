"""Small federations over Flower that the tests share: an unchanged client app, and grids in which things go wrong."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddpc import flower
from feddpc.flower.client_app_strategy import ClientAppStrategy
from support import small_setting

NODES = 8
W = ArrayRecord({"weight": Array(np.zeros((3, 2))), "bias": Array(np.zeros(2))})


def move(node: int, t: int) -> dict[str, np.ndarray]:
    """How far plain client ``node`` moves the weights in round ``t``."""
    rng = np.random.default_rng([node, t])
    return {"weight": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}


def plain_app(scale: Callable[[int], float] = lambda t: 1.0) -> ClientApp:
    """A client app as people have them: it gets weights and returns weights; ``scale`` is its rate in a round."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        t, node = message.content["config"]["server-round"], context.node_config["partition-id"]
        arrays = {k: Array(a.numpy() - scale(t) * move(node, t)[k]) for k, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 10 + node, "loss": float(node)})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        total = float(sum(a.numpy().sum() for a in message.content["arrays"].values()))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "sum": total})}), reply_to=message)

    return app


class Unreliable(flower.InProcessGrid):
    """A grid in which ``fault(round, node, replies)`` may change what node ``victim`` answers, in training."""

    def __init__(self, app, nodes=NODES, *, victim=None, fault=None, **more):
        super().__init__(app, nodes, **more)
        self.victim, self.fault = victim, fault

    def deliver(self, message):
        replies = super().deliver(message)
        about = message.metadata
        if self.fault is not None and about.message_type == "train" and about.dst_node_id == 1000 + self.victim:
            return self.fault(int(about.group_id), replies)
        return replies


def halves(**values):
    """The small federation of the simulator as arguments of strategy and client_app."""
    arguments = flower.app_arguments(small_setting(**values))
    return arguments.server(), arguments.client()


def forged(spec, **changes):
    """The specification of an experiment with other values, whether they make sense or not."""
    whole = {key: changes.pop(key) for key in list(changes) if hasattr(spec, key)}
    if changes:
        whole["settings"] = json.dumps(json.loads(spec.settings) | changes)
    return dataclasses.replace(spec, **whole)


def train(strategy, grid, rounds=3, **more):
    """Start any strategy."""
    first = strategy.initial_arrays() if isinstance(strategy, ClientAppStrategy) else W
    return strategy.start(grid, first, num_rounds=rounds, **more)


def vector(strategy) -> torch.Tensor:
    """The model."""
    return strategy.now.w


#: All nodes in every round.
EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES}


def judged(t, arrays):
    """What a server measures whose model gets better."""
    return MetricRecord({"loss": 2.0 / (t + 1), "accuracy": t / 10, "per-class": [0.1, 0.2]})


def run(folder, rounds=3, evaluate_fn=judged, arrays=W, train_config=None, **more):
    """Run FedDPC with a folder."""
    strategy = flower.FedDPC(**{**EVERYBODY, **more}, folder=folder)
    result = strategy.start(
        Unreliable(plain_app()), arrays, num_rounds=rounds, train_config=train_config, evaluate_fn=evaluate_fn
    )
    return strategy, result


def moved(by=1.0, dtype=np.float64):
    """Other first weights."""
    return ArrayRecord({k: Array((a.numpy() + by).astype(dtype)) for k, a in W.items()})
