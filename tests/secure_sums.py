"""Federations under secure aggregation, and the plain server beside them, for the tests of both."""

import numpy as np
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from feddpc import flower, methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.engines.loop import Loop
from feddpc.round.exchange import train_and_step
from feddpc.round.state import RunState

CLIENTS, COHORT = 8, 4
CLIENT_SIDE = "flwr.client.mod.secure_aggregation.secaggplus_mod"
SERVER_SIDE = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"


class Watched(flower.InProcessGrid):
    """A grid that keeps what comes to the server, by stage, and can lose or change it on the way."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.seen = []
        self.tamper = lambda stage, client, reply: [reply]

    def deliver(self, message):
        record = message.content.get(RECORD_KEY_CONFIGS)
        if record is None:
            return super().deliver(message)
        client, stage = message.metadata.dst_node_id - 1000, record[Key.STAGE]
        (reply,) = super().deliver(message)
        self.seen.append((int(message.metadata.group_id), stage, client, reply))
        return self.tamper(stage, client, reply)

    def replies(self, stage, round=None):
        return {c: r for t, s, c, r in self.seen if s == stage and round in (None, t) and r.has_content()}


def federated(setting, method="feddpc", rounds=1, apps=None, tamper=None, snapshots=None, **more):
    halves = flower.app_arguments(setting)
    grid = Watched(apps or flower.secure_client_app(**halves.client()), len(setting.population))
    if tamper is not None:
        grid.tamper = tamper
    strategy = flower.secure_strategy(method, **{**halves.server(), **more})

    def keep(t, arrays):
        if snapshots is not None:
            snapshots.append((strategy.now.w.clone(), {k: v.clone() for k, v in strategy.now.server.items()}))

    strategy.start(grid, strategy.initial_arrays(), num_rounds=rounds, evaluate_fn=keep)
    return strategy, grid


def plain(setting, method, ids, t=1, state=None):
    """The state after a round of the plain server in which clients ``ids`` take part."""
    method = methods.create(method) if isinstance(method, str) else method
    progress = RunState.begin(method, setting.w0, len(setting.population))
    if state is not None:
        progress.w, progress.server = state[0].clone(), state[1]
    plan, cohort = setting.cohort(method, t, np.array(ids), progress.slots.read(np.array(ids)))
    train_and_step(setting, method, Loop(), progress, plan, cohort, {})
    return progress


def lenet(clients=6, **values):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (90, 32, 32, 3), dtype=np.uint8), np.arange(90) % 10
    data = Dataset.from_arrays(images[:80], labels[:80], images[80:], labels[80:], name="noise")
    config = {"model": "lenet5", "cohort": 4, "batch_size": 8, "rounds": 3, "lr": 0.1, "device": "cpu"}
    sizes = [20, 4, 16, 12, 8, 20][:clients]
    return build(Config.read({**config, **values}), data=data, partition=Partition.from_sizes(np.arange(80), sizes))


def losing(*lost):
    """Lose the reply of a client in a stage."""
    return lambda stage, client, reply: [] if (client, stage) in lost else [reply]


def cohort_of(setting, t=1):
    return setting.draw(t).answered.tolist()
