"""Void rounds in a row: a run that trains nothing must not look like one that trained."""

from __future__ import annotations

from pathlib import Path

from feddpc.checks import check_int
from feddpc.flower.received import TOO_LONG
from feddpc.flower.screening import VoidRoundsError

#: What to do when replies were beyond the adaptive bound on norms.
BOUND = (
    ". If the updates that are much longer than usual are honest, as after a warm-up of the clients' rate: the bound "
    "follows when most of the last replies are as long, so start again until then; or begin a run in another folder "
    "with a larger bound, screen={'norm': ...}, one that follows sooner, screen={'norm': ..., 'window': ...}, or "
    "screen=None"
)


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
        reasons = " | ".join(self.reasons)
        begin = "start again" if folder is None else f"start again with folder = {str(folder)!r} to continue"
        raise VoidRoundsError(
            f"no reply counted in {len(self.reasons)} rounds in a row (max_void_rounds = {self.most}): "
            f"{reasons}. Remove the cause and {begin}, or raise max_void_rounds{BOUND if TOO_LONG in reasons else ''}"
        )
