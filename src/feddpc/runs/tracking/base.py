"""What a tracker is, and which numbers of a round it is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from feddpc.config import Config

#: At most this long between two times that a tracker brings what it has to where it belongs.
SECONDS = 5.0


class Tracker(Protocol):
    """Sends what a run records somewhere else. If that fails, the run continues without it."""

    name: str

    def begin(self, config: Config, folder: Path, past: Sequence[dict[str, Any]]) -> None:
        """A run starts, or goes on after the rounds in ``past``; what was tracked then must not be there twice."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished; the record is the one in rounds.jsonl."""

    def end(self, summary: dict[str, Any] | None) -> None:
        """The run has ended; without a summary it was broken off and may be resumed."""


def values(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a round by their names in rounds.jsonl; of a list, how long it is.

    >>> values({"round": 3, "test_loss": 0.5, "train_loss": None, "participants": [4, 7], "mean_scale": 2.0})
    {'test_loss': 0.5, 'participants': 2.0, 'mean_scale': 2.0}
    """
    numbers = {k: len(v) if isinstance(v, list) else v for k, v in record.items() if k != "round"}
    return {k: float(v) for k, v in numbers.items() if isinstance(v, int | float) and math.isfinite(v)}


def dated(past: Sequence[dict[str, Any]], now: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Return rounds and when each would have ended if the last one had ended now.

    >>> [when for _, when in dated([{"seconds": 1.0}, {"seconds": 2.0}], now=10.0)]
    [8.0, 10.0]
    """
    elapsed = list(accumulate(record["seconds"] for record in past))
    return ((record, now - elapsed[-1] + then) for record, then in zip(past, elapsed, strict=True))
