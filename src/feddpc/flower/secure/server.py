"""Making strategies and server apps whose server sees nothing but sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Result

from feddpc.errors import BadInputError
from feddpc.flower.secure.rules import summable
from feddpc.flower.secure.strategy import SecureStrategy
from feddpc.flower.server import app_of, strategy
from feddpc.methods.base import Method

#: Far above what clients send at usual rates, and still a mean that is off by less than 1e-7 with ten clients.
MAX_NORM = 10.0


def secure_strategy(
    method: Method | str = "feddpc",
    *,
    max_norm: float = MAX_NORM,
    hyper: dict[str, Any] | None = None,
    **settings: Any,
) -> SecureStrategy:
    """Return a Flower strategy for nodes that run :func:`feddpc.flower.secure_client_app`.

    Args:
        method: ``feddpc`` (clients then project and scale for themselves), or another whose server needs only the sum:
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
    plain = strategy(summable(method, **(hyper or {})), max_norm=max_norm, **settings)
    return SecureStrategy(
        plain.holdings,
        max_norm=max_norm,
        wait=plain.wait,
        bounds=plain.bounds,
        min_replies=plain.min_replies,
        max_void_rounds=plain.max_void_rounds,
        folder=plain.folder,
        flower={"min_available_nodes": plain.min_available_nodes, "fraction_evaluate": 0.0},
    )


def secure_server_app(
    method: Method | str = "feddpc",
    *,
    rounds: int = 100,
    deadline: float = 3600.0,
    on_result: Callable[[SecureStrategy, Result], object] | None = None,
    **settings: Any,
) -> ServerApp:
    """Return a server app that runs ``rounds`` rounds of :func:`secure_strategy`; ``settings`` are that function's.

    The app's configuration comes before what is given here, as for :func:`feddpc.flower.server_app`.

    Args:
        method: see ``secure_strategy``.
        rounds: communication rounds.
        deadline: seconds after which each of a round's four stages goes on without the replies that are missing.
        on_result: called with the strategy and Flower's result at the end.
        settings: everything else.
    """
    return app_of(secure_strategy, method, rounds, deadline, on_result, settings)
