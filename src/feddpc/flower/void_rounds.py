"""Void rounds in a row: a run that trains nothing must not look like one that trained."""

from __future__ import annotations

from pathlib import Path

from feddpc.checks import check_int
from feddpc.flower.screening import VoidRoundsError


class VoidRounds:
    """The void rounds since the last round that counted, each with the reason of every reply."""

    def __init__(self, most: int) -> None:
        self.most = check_int("max_void_rounds", most, 1)
        self.reasons: list[str] = []

    def add(self, reason: str) -> None:
        """Add a void round."""
        self.reasons.append(reason)

    def forget(self) -> None:
        """Start counting again: a round counted, or a run begins."""
        self.reasons = []

    def check(self, folder: Path | None) -> None:
        """Raise after too many in a row; ``folder`` is where the run is stored."""
        if len(self.reasons) < self.most:
            return
        begin = "start again" if folder is None else f"start again with folder = {str(folder)!r} to continue"
        raise VoidRoundsError(
            f"no reply counted in {len(self.reasons)} rounds in a row (max_void_rounds = {self.most}): "
            f"{' | '.join(self.reasons)}. Remove the cause and {begin}, or raise max_void_rounds"
        )
