"""The strategy under secure aggregation: a round is one secure sum, and the server rule sees its mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.federated import FederatedStrategy
from feddpc.flower.screening import Bounds
from feddpc.flower.secure.encoding import SECURE, Encoding
from feddpc.flower.secure.protocol import Summed, Terms, secure_mean
from feddpc.flower.secure.rules import repeated
from feddpc.flower.wire import RefusedError
from feddpc.methods._algebra import residuals
from feddpc.methods.base import State
from feddpc.round.federation import gather
from feddpc.round.server_step import apply_step


class SecureStrategy(FederatedStrategy):
    """A method whose server sees nothing but sums; made by :func:`feddpc.flower.secure_strategy`."""

    def __init__(self, *rest: Any, max_norm: float, **more: Any) -> None:
        super().__init__(*rest, **more)
        check(self.config)
        self.max_norm = max_norm
        self._encoding = Encoding(max_norm, self.config.cohort)
        self._summed = Summed()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the round's whole exchange; for Flower's own, one message and one reply a node, nothing is left."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._encoding, self._summed = Encoding(self.max_norm, max(len(messages), 1)), Summed()
        if len(messages) >= self.quorum(len(messages)):
            for message in messages:
                message.content[SECURE] = self._encoding.record()
            self._summed = secure_mean(grid, messages, self._terms(self._offset + server_round, len(messages)))
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the server rule move the model along the mean; without one the round is void."""
        t = self._offset + server_round
        ids = np.array(sorted(self.roll.nodes[node] for node in self._summed.nodes), dtype=np.int64)
        refused = self.desk.refused + self._summed.refused
        silent = set(self._invited.tolist()) - set(ids.tolist()) - {r.client for r in refused}
        dropped = {*silent, *self.federation.draw(t).dropped.tolist()}
        mean = self._opened(t)
        if mean is None:
            void = "the sum was not opened" if self._summed.mean is None else "the mean is too long"
            return self._close_void_round(t, dropped, refused, void if len(self._invited) else None, {})
        loss, aside = float(mean.pop("loss")), self._aside(mean)
        _, cohort = gather(self.federation, self.served, self.now, t, ids)
        step = self.method.aggregate(self.now.w, self.now.server, repeated(mean, len(ids)), cohort)
        notes = apply_step(self.now, ids, step)
        self.accept(t, ids, {client: node for node, client in self.roll.nodes.items()})
        record = self.keep(t, ids, dropped, refused, loss=loss, notes=notes | aside)
        return self.arrays(), MetricRecord({"replies": float(len(ids)), "train-loss": loss, **record.notes})

    def quorum(self, invited: int) -> int:
        """Return how many must be in the sum: ``min_replies``, and more than half, or two halves could both open it."""
        return max(self.min_replies, invited // 2 + 1, 2)

    def _terms(self, t: int, invited: int) -> Terms:
        return Terms(
            round=t,
            clients=self.roll.nodes,
            encoding=self._encoding,
            sizes=[int(np.prod(shape)) for shape in self._shapes().values()],
            quorum=self.quorum(invited),
            timeout=self.desk.timeout,
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What every client sends: what the method says, and its training loss."""
        return {name: tuple(look.shape) for name, look in self._looks.items()} | {"loss": ()}

    def _opened(self, t: int) -> State | None:
        """Return the mean, unless it is longer than any mean of updates that kept to the bound."""
        if self._summed.mean is None:
            return None
        mean = self._encoding.decode(self._summed.mean, self._shapes(), self.now.w.dtype)
        longest = self.max_norm + self._encoding.error * math.sqrt(self.layout.d)
        try:
            Bounds(longest * (1 + 1e-6)).check("the mean", mean["delta"])
        except RefusedError as error:
            log(WARNING, "round %d: %s: somebody broke the protocol, and who cannot be known", t, error)
            return None
        return mean

    def _aside(self, mean: State) -> dict[str, float]:
        """Return the cosine of the mean with g, which clients have projected out: all that can be checked of a sum."""
        if "delta" not in self.now.server:
            return {}
        return {"along_g": abs(float(residuals(mean["delta"][None], self.now.server["delta"]).cosine_m))}


def check(config: Config) -> None:
    """Refuse what a server that sees only sums cannot do."""
    if config.batch_size is None:
        raise BadInputError("batch_size is open, and the server does not learn how many samples there are: give it")
    if config.weighting != "uniform":
        raise BadInputError(
            f"weighting = {config.weighting!r} needs the clients' sizes, which are hidden: use 'uniform'"
        )
    if config.participation == "weighted":
        raise BadInputError("participation = 'weighted' needs the clients' sizes, which are hidden: use another")
    if config.rule != "mean" or config.screen:
        raise BadInputError("rule and screen compare single updates, which the server does not see: leave them out")
    if config.faults:
        raise BadInputError("faults are made in replies, which are masked here: try them without secure aggregation")
    if config.privacy:
        raise BadInputError("privacy clips every client's update at the server, which does not see any: leave it out")
