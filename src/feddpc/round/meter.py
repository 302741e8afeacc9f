"""What a method costs, counted while it runs: numbers sent and remembered, gradients and passes through the network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from feddpc.tasks.base import Tally


@dataclass
class Meter:
    """Counts of one run; ``clients`` counts participations, ``steps`` the local steps of an ordinary participant.

    ``once`` is what each client of the population does before round 1.
    """

    d: int = 0
    clients: int = 0
    steps: int = 0
    down: int = 0
    up: int = 0
    gradients: int = 0
    passes: int = 0
    client_state: int = 0
    server_state: int = 0
    down_once: float = 0
    up_once: float = 0
    gradients_once: float = 0

    def add_work(self, now: Tally, before: Tally) -> None:
        """Count the gradients and passes since ``before``."""
        self.gradients += now.gradients - before.gradients
        self.passes += now.passes - before.passes

    def summary(self) -> dict[str, float]:
        """Return the counts a participant and round, in multiples of d, and the work a local step."""
        if not (self.clients and self.d):
            return {}
        traffic = {k: getattr(self, k) / (self.clients * self.d) for k in ("down", "up")}
        states = {k: getattr(self, k) / self.d for k in ("client_state", "server_state", "down_once", "up_once")}
        work = {k: getattr(self, k) / self.steps for k in ("gradients", "passes")}
        work["gradients_once"] = self.gradients_once
        return {k: round(v, 6) for k, v in (traffic | states | work).items()}


def numbers(tensors: Iterable[Tensor]) -> int:
    """Return how many numbers ``tensors`` hold."""
    return sum(t.numel() for t in tensors)
