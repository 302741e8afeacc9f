"""Asks for replies more often than Flower's own grid, which sleeps three seconds between two looks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
#: Seconds between two looks: a share of the time waited so far, within bounds. Flower's grid always sleeps the longest.
SHORTEST, LONGEST, SHARE = 0.1, 3.0, 0.05


class GridWrapper(Grid):
    """Passes everything on to ``grid``; a subclass changes what it overrides."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    # What Flower's class declares would hide the grid's own.

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self.grid.run

    def create_message(
        self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes' ids."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return what the grid knows about its nodes."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that came before ``timeout``."""
        return self.grid.send_and_receive(messages, timeout=timeout)


class PollingGrid(GridWrapper):
    """Flower's grid of a deployment with shorter waits: a round is noticed as complete within 5 % of what it took."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that came before ``timeout``."""
        missing = {name for name in self.grid.push_messages(list(messages)) if name}  # nothing: it was not accepted
        del messages  # they hold the model, and the wait may be long
        replies: list[Message] = []
        begin = time.monotonic()
        end = float("inf") if timeout is None else begin + timeout
        while missing and (now := time.monotonic()) < end:
            replies += (came := list(self.grid.pull_messages(missing)))
            missing -= {reply.metadata.reply_to_message_id for reply in came}
            if missing:
                time.sleep(min(pause(now - begin), max(end - time.monotonic(), 0.0)))
        return replies


def pause(waited: float) -> float:
    """Return how long to sleep after ``waited`` seconds without all replies.

    >>> pause(0.0), pause(10.0), pause(3600.0)
    (0.1, 0.5, 3.0)
    """
    return min(max(waited * SHARE, SHORTEST), LONGEST)


def prompt(grid: Grid) -> Grid:
    """Return ``grid``, with shorter waits if it is Flower's own grid of a deployment."""
    from flwr.superlink import grid as flowers

    return PollingGrid(grid) if type(grid) is getattr(flowers, "HttpGrid", None) else grid


def polled(start: Callable[Concatenate[S, Grid, P], R]) -> Callable[Concatenate[S, Grid, P], R]:
    """Let a strategy's ``start`` run with :func:`prompt`; to be applied last, so that it sees Flower's own grid."""

    @functools.wraps(start)
    def run(self: S, grid: Grid, *args: P.args, **more: P.kwargs) -> R:
        return start(self, prompt(grid), *args, **more)

    return run  # type: ignore[return-value]  # a method keeps being one
