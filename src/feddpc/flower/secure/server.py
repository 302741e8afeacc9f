"""Strategies and server apps under secure aggregation: a round is one secure sum, and the server sees only its mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.assets import ServerAssets
from feddpc.flower.client_app_strategy import ClientAppStrategy
from feddpc.flower.client_registry import Ints
from feddpc.flower.messages import RefusedError
from feddpc.flower.received import Received
from feddpc.flower.screening import Bounds
from feddpc.flower.secure.encoding import SECURE, Encoding, repeated, summable
from feddpc.flower.secure.protocol import ScreenedGrid, Summed, secure_mean
from feddpc.flower.server import server_app, strategy
from feddpc.methods._algebra import residuals
from feddpc.methods.base import Method, State
from feddpc.round.server_step import StepOutcome

#: Far above what clients send at usual rates, and still a mean that is off by less than 1e-7 with ten clients.
MAX_NORM = 10.0


def secure_strategy(
    method: Method | str = "feddpc",
    *,
    max_norm: float = MAX_NORM,
    hyper: dict[str, Any] | None = None,
    **settings: Any,
) -> ClientAppStrategy:
    """Return a Flower strategy for nodes that run :func:`feddpc.flower.secure_client_app`.

    Args:
        method: ``feddpc`` (clients then project and scale their own updates), or another that needs only the sum:
            ``fedavg``, ``fedprox``.
        max_norm: the longest update, in units of the model, that a client sends; one with a longer one drops out of
            the round. Every coordinate of the mean is off by at most ``2 max_norm / levels``, see ``Encoding``.
        hyper: hyper-parameters of a method given by name.
        settings: as for :func:`feddpc.flower.strategy`; ``batch_size`` must be among them, and ``min_replies`` is
            raised to more than half of the cohort.
    """
    if settings.get("fraction_evaluate"):
        raise BadInputError(
            "fraction_evaluate: what single clients measure is not hidden, so none is asked: leave it out"
        )
    return strategy(summable(method, **(hyper or {})), max_norm=max_norm, kind=SecureStrategy, **settings)


def secure_server_app(method: Method | str = "feddpc", **settings: Any) -> ServerApp:
    """Return a server app that runs rounds of :func:`secure_strategy`.

    Args:
        method: see ``secure_strategy``.
        settings: those of ``secure_strategy``, and ``rounds``, ``deadline`` and ``on_result`` of
            :func:`feddpc.flower.server_app`. Each of a round's four stages may take ``deadline`` seconds.
    """
    return server_app(method, make=secure_strategy, **settings)


class SecureStrategy(ClientAppStrategy):
    """The strategy under secure aggregation: a whole secure sum takes the place of one message and reply per node."""

    sees_uploads = False

    def __init__(self, assets: ServerAssets, **more: Any) -> None:
        check_config(assets.config)
        super().__init__(assets, **more)
        assert self.bounds.max_norm is not None
        self.max_norm = self.bounds.max_norm
        self._encoding = Encoding(self.max_norm, self.config.cohort)
        self._summed = Summed()
        self._mean: State = {}

    def quorum(self, invited: int) -> int:
        """Return how many must be in the sum: ``min_replies``, and more than half, or two halves could both open it."""
        return max(self.min_replies, invited // 2 + 1, 2)

    def invite(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Run the round's whole exchange; no message is left for Flower to send."""
        messages = super().invite(t, arrays, config, grid)
        self._encoding, self._summed = Encoding(self.max_norm, max(len(messages), 1)), Summed()
        if len(messages) >= self.quorum(len(messages)):
            for message in messages:
                message.content[SECURE] = self._encoding.record()
            self._summed = secure_mean(
                ScreenedGrid(grid, t, self.registry.nodes, self._shapes()),
                messages,
                self._encoding,
                self.quorum(len(messages)),
                self.nodes.timeout,
            )
        return []

    def receive(self, t: int, replies: Iterable[Message]) -> Received:
        """Return the clients that are in the mean, and the replies that the protocol dropped.

        Of a mean, only its length and its cosine with g can be checked. Clients have projected g out, so the cosine
        should be zero.
        """
        ids = sorted(self.registry.nodes[node] for node in self._summed.nodes)
        received = self.received(t, ids, self.nodes.refused + self._summed.refused)
        self._mean, g = self._open(t) or {}, self.now.server.get("delta")
        if not self._mean:
            received.void = "the sum was not opened" if self._summed.mean is None else "the mean is too long"
        elif g is not None:
            received.notes["along_g"] = abs(float(residuals(self._mean["delta"][None], g).cosine_m))
        return received

    def stack(self, received: Received) -> State:
        """Return the mean in place of every client's upload."""
        mean = {name: value for name, value in self._mean.items() if name != "loss"}
        return repeated(mean, len(received.ids))

    def summarize(self, received: Received, ids: Ints, outcome: StepOutcome) -> tuple[float, Mapping[str, Any]]:
        """Return the mean training loss."""
        loss = float(self._mean["loss"])
        return loss, {"train-loss": loss}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what every client sends: the method's upload, and the training loss."""
        return {name: tuple(like.shape) for name, like in self._templates.items()} | {"loss": ()}

    def _open(self, t: int) -> State | None:
        """Return the mean, unless it is longer than any mean of updates within the bound."""
        if self._summed.mean is None:
            return None
        mean = self._encoding.decode(self._summed.mean, self._shapes(), self.now.w.dtype)
        longest = self.max_norm + self._encoding.error * math.sqrt(self.layout.d)
        try:
            Bounds(longest * (1 + 1e-6)).check("the mean", mean["delta"])
        except RefusedError as error:
            log(WARNING, "round %d: %s: a client broke the protocol, and which one cannot be known", t, error)
            return None
        return mean


def check_config(config: Config) -> None:
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
        raise BadInputError("faults change replies, which are masked: try them without secure aggregation")
    if config.privacy:
        raise BadInputError("privacy clips every client's update at the server, which does not see any: leave it out")
