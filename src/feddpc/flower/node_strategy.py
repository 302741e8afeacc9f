"""Which nodes train and evaluate, in a strategy that knows clients by the ids of their nodes only."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from feddpc.errors import BadInputError
from feddpc.flower.dropin_settings import DropInPrivacy
from feddpc.flower.messages import NEVER, only_record
from feddpc.flower.method_strategy import MethodStrategy
from feddpc.flower.screening import averageable, screen_replies
from feddpc.runs.record import is_run, load_config


class NodeStrategy(MethodStrategy):
    """Sampling of nodes and their evaluations as in Flower's ``FedAvg``; nodes get client numbers as they come."""

    clients: int | None  #: how many there are, where that is known
    privacy: DropInPrivacy | None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.client_of: dict[int, int] = {}  #: client number of every node seen
        self.sizes = 1, 1  #: how many clients there are, and how many of them a round asks, as a record says it
        self._sampled = False  # whether a round has been sampled since the run began

    def enroll(self, grid: Grid, timeout: float) -> None:
        """Count the clients, for the run's folder; a run that is continued keeps the numbers of its beginning."""
        fraction, least, clients = self.fraction_train, self.min_train_nodes, self.clients
        if self.folder is not None and is_run(self.folder):
            stored = load_config(self.folder)
            self.sizes = stored.clients, stored.cohort
        elif self.folder is not None and fraction:
            clients = clients or len(wait_for_nodes(grid, self.min_available_nodes, fraction, least))
            self.sizes = clients, max(1, min(clients, max(int(clients * fraction), least)))

    def invite(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Sample nodes as Flower does, or by coins under privacy, and send them the model."""
        if self.privacy is not None and self.policies.privacy is None:
            raise BadInputError("privacy: the noise depends on the number of rounds: let start() run them")
        if self.state is None:
            self.enroll(grid, 0.0)
            self.begin(arrays, t)
        else:
            self.set_model(arrays)
        if not self.fraction_train:
            return []
        connected = wait_for_nodes(grid, self.min_available_nodes, self.fraction_train, self.min_train_nodes)
        self._number(connected)
        self._refuse_unknown_nodes(connected)
        return self._messages(t, MessageType.TRAIN, arrays, config, self._sample(t, connected))

    def _messages(
        self, t: int, kind: str, arrays: ArrayRecord, config: ConfigRecord, nodes: list[int]
    ) -> list[Message]:
        config["server-round"] = t
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return list(self._construct_messages(record, nodes, kind))

    def _sample(self, t: int, connected: list[int]) -> list[int]:
        """Return the nodes that take part in round ``t``."""
        if self.privacy is not None:
            return sample_by_coins(connected, self.fraction_train)
        fraction, least = self.fraction_train, max(self.min_replies, self.min_train_nodes)
        eligible = connected if self.quarantine is None else self.quarantine.choose(connected, t, least)
        nodes = sample_share(eligible, len(connected), fraction, self.min_train_nodes, "training")
        if not self._sampled:
            refuse_small_sample(len(nodes), len(connected), self.min_replies, fraction, self.min_train_nodes)
        self._sampled = True
        return nodes

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as Flower does, none in quarantine; send them the model that the method's authors evaluate."""
        t, fraction, least, self.sent = self.offset + server_round, self.fraction_evaluate, self.min_evaluate_nodes, []
        if fraction:
            connected = wait_for_nodes(grid, self.min_available_nodes, fraction, least)
            out = self.quarantined(t)
            eligible = [node for node in connected if node not in out]
            nodes = sample_share(eligible, len(connected), fraction, least, "evaluation")
            self.sent = self._messages(t, MessageType.EVALUATE, self.evaluated(arrays), config, nodes)
        return self.sent

    def read_evaluations(self, t: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average metrics as Flower does; a reply whose metrics cannot be averaged is left out."""

        def read(_: int, content: RecordDict) -> RecordDict:
            self.bounds.weight(self.weighted_by_key, only_record(content, MetricRecord).get(self.weighted_by_key))
            return content

        good, refused = screen_replies(replies, self.sent, None, t, read)
        self.run_log.pending += refused
        usable = averageable(list(good.values()), self.weighted_by_key)
        return self.evaluate_metrics_aggr_fn(usable, self.weighted_by_key) if usable else None

    def test_values(self, server: Mapping[str, Any], clients: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the server's function measured; without one, the means of what clients measured."""
        return server if self.evaluates_itself else clients

    def _number(self, nodes: Iterable[int]) -> None:
        """Give new nodes client numbers; a checkpoint keeps them."""
        new = sorted(set(nodes) - self.client_of.keys())
        ids = np.arange(len(self.client_of), len(self.client_of) + len(new))
        self.client_of |= dict(zip(new, ids.tolist(), strict=True))
        self.mark_accepted(NEVER, ids, dict(zip(ids.tolist(), new, strict=True)))

    def _refuse_unknown_nodes(self, nodes: list[int]) -> None:
        """Raise if no connected node can be one of the clients that this run remembers."""
        connected, n = {self.client_of[node] for node in nodes}, self.clients
        if self.privacy is None and n is not None and connected and min(connected) >= n:
            raise BadInputError(
                f"this run knows {n} clients by the ids of their nodes, and all connected nodes have other ids: start "
                "nodes with keys of their own and the SuperLink with --database, so that ids stay, or begin a new run"
            )


def wait_for_nodes(grid: Grid, available: int, fraction: float, least: int) -> list[int]:
    """Return the connected nodes, as soon as there are ``available``, and enough for the sample that is taken of them.

    Flower waits for the sample that it takes of all nodes; here a fraction may be taken of fewer.
    """
    connected = len(sample_nodes(grid, available, 0)[1])
    return list(sample_nodes(grid, max(int(connected * fraction), least), 0)[1])


def sample_share(eligible: Sequence[int], connected: int, fraction: float, least: int, purpose: str) -> list[int]:
    """Return a sample of nodes: that fraction of the connected ones, but at least ``least``, if so many are eligible.

    The numbers come from Python's generator, as in Flower, so that the same seed draws the same nodes.
    """
    size = min(max(int(connected * fraction), least), len(eligible))
    chosen = random.sample(eligible, size)
    log(INFO, "%s: sampled %s nodes (out of %s)", purpose, len(chosen), connected)
    return chosen


def sample_by_coins(nodes: Sequence[int], probability: float) -> list[int]:
    """Return the nodes whose independent coins say so, perhaps none.

    The coins come from the operating system, since the promise of differential privacy counts on their being secret.
    """
    coin = secrets.SystemRandom()
    return [node for node in nodes if coin.random() < probability]


def refuse_small_sample(sampled: int, nodes: int, least: int, fraction: float, min_nodes: int) -> None:
    """Raise if fewer nodes are sampled than must answer."""
    if sampled >= least:
        return
    raised = f"fraction_train to at least {least / nodes:.3g} or min_train_nodes to {least}"
    more = raised if least <= nodes else f"the number of nodes to {least}"
    raise BadInputError(
        f"min_replies = {least}, but {sampled} of {nodes} nodes are sampled per round (fraction_train = {fraction}, "
        f"min_train_nodes = {min_nodes}), so no round could count: lower min_replies to at most {sampled}, or raise "
        f"{more}"
    )
