"""Keeping the model of the best round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddpc.errors import RunFolderError
from feddpc.methods.base import Method
from feddpc.round.state import RunState
from feddpc.tasks.metrics import Metric


class BestModel:
    """Keeps the model of the round with the best value of ``metric`` on ``part``, test or validation data.

    ``past`` are the records of earlier rounds, and ``state`` has their best model.
    """

    def __init__(
        self, metric: Metric, part: str, method: Method, state: RunState, past: Sequence[dict[str, Any]]
    ) -> None:
        self.method, self.state = method, state
        self.metric, self.key = metric, metric.key(part)
        scored = [record for record in past if record[self.key] is not None]
        self.record = self.metric.pick(scored, lambda record: record[self.key])
        if self.record is not None and state.best is None:
            raise RunFolderError(
                f"the checkpoint of round {state.round} lacks the model of round {self.round}, which the run keeps "
                '(keep = "best"): restore the checkpoint, or start a new run'
            )

    @property
    def round(self) -> int | None:
        """The best round so far; None while no round was evaluated."""
        return None if self.record is None else int(self.record["round"])

    def see(self, record: dict[str, Any], diverged: str | None) -> None:
        """Keep the present model if its round is the best one; a round that was not evaluated does not count."""
        value = record[self.key]
        if diverged or value is None:
            return
        if self.record is None or self.metric.sign * value > self.metric.sign * self.record[self.key]:
            self.record, self.state.best = record, self.state.model(self.method).clone()
