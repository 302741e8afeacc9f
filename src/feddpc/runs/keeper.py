"""Writing a run down: every round, a checkpoint now and then, and what several ranks must agree on first."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from feddpc.errors import RunFolderError
from feddpc.ranks import RankError, Ranks
from feddpc.round.round import RoundRecord
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import LogMark
from feddpc.runs.record import RunFolder, is_run
from feddpc.storage import explain_os_errors

#: How a run ended, and why; None while it goes on.
Ended = tuple[str, str | None] | None
#: How runs end that have nothing left to compute.
ENDED = ("finished", "diverged")
#: How a rank says to the others that its run ends; the largest counts.
CODES = ("", "finished", "diverged", "interrupted", "stopped")


class Keeper:
    """Writes every round down, and a checkpoint now and then; without a folder it does nothing.

    Of several ranks only the first has the ``folder``; all of them have their part of a checkpoint.
    """

    def __init__(
        self, folder: RunFolder | None, out: Path | None, state: RunState, seconds: float, lean: bool, ranks: Ranks
    ) -> None:
        self.folder, self.out, self.state, self.lean, self.ranks = folder, out, state, lean, ranks
        self.seconds = seconds
        self._next = time.monotonic() + seconds
        self._due = False

    def agree(self, ended: Ended) -> Ended:
        """Return how the run ends for all ranks; raise an error if one of them has another model."""
        if self.ranks.size == 1:
            return ended
        due = ended is not None or time.monotonic() >= self._next
        code = CODES.index(ended[0]) if ended else 0
        said = self.ranks.numbers([*fingerprint(self.state.w), code, int(due)])
        models = [tuple(numbers[:2]) for numbers in said]
        usual, count = Counter(models).most_common(1)[0]
        if count < len(models):
            odd = [rank for rank, model in enumerate(models) if model != usual]
            ranks = f"rank {odd[0]} has another model than the others" if count > 1 else "no two ranks have one model"
            raise RankError(f"after round {self.state.round} {ranks}: are machines, libraries and data the same?")
        codes = [numbers[2] for numbers in said]
        self._due = any(codes) or bool(said[0][3])
        if max(codes) == code:
            return ended
        rank = codes.index(max(codes))
        return CODES[max(codes)], f"stopped by rank {rank} after round {self.state.round}"

    def keep(self, record: RoundRecord, ended: Ended) -> None:
        """Record a round, and how the run ended if it was the last."""
        if self.out is None:
            return
        mark = LogMark()
        if self.folder is not None:
            self.folder.append(record)
        began = time.monotonic()
        due = self._due if self.ranks.size > 1 else ended is not None or began >= self._next
        if not due or (ended is not None and self.lean and ended[0] in ENDED):
            return  # in the second case the checkpoints are about to go
        if self.folder is not None:
            self.folder.records.sync()  # they must be on the disk before a checkpoint says so
            mark = self.folder.records.mark
        checkpoint.save(self.out / "checkpoint", self.state, mark, record.diverged, ranks=self.ranks)
        # A slow checkpoint (a large memory of clients) must not take more than a twentieth of the time.
        took, share = time.monotonic() - began, 100 if self.lean else 20
        self._next = time.monotonic() + max(self.seconds, share * took if self.seconds else 0.0)


def fingerprint(w: Tensor) -> tuple[int, int]:
    """Return two numbers that differ if any bit of a model does, but for chance.

    >>> (
    ...     fingerprint(torch.zeros(9)) == fingerprint(torch.zeros(9)),
    ...     fingerprint(torch.zeros(9)) == fingerprint(torch.tensor([0.0] * 8 + [1e-45])),
    ... )
    (True, False)
    """
    bits = w.detach().contiguous().view(torch.int64 if w.element_size() == 8 else torch.int32)
    return int(bits.sum(dtype=torch.int64)), int(bits[::3].sum(dtype=torch.int64))


def check_shared(out: Path, rank: int) -> None:
    """Raise unless this rank sees the folder that rank 0 has made, and can write there."""
    if not is_run(out):
        raise RunFolderError(f"{out} is not there: all ranks need the same folder, on a file system that they share")
    probe = out / "checkpoint" / f".rank-{rank}.part"
    with explain_os_errors(probe):
        probe.parent.mkdir(exist_ok=True)
        probe.write_bytes(b"0" * 65536)
        probe.unlink()
