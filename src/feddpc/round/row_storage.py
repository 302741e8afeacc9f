"""Where the rows of a memory lie: in a table on the device or in host memory, or in a file on disk.

A store knows rows by number, 0, 1, 2, ...; whose they are is the memory's business.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.errors import RunFolderError, unusable
from feddpc.methods.base import State

#: What a store on disk exports in place of its rows. No method's key: those are names.
SLOTS = "/slots"
#: The checksums of those rows.
SUMS = "/sums"
#: Slots begin on a page, so that writing one touches no page of another.
PAGE = 4096


class RowStore(Protocol):
    """A store of rows; all have the keys, shapes and types of one template."""

    def read(self, rows: Sequence[int], into: State, at: Sequence[int]) -> None:
        """Copy ``rows`` to the places ``at`` of the stacks ``into``."""

    def write(self, rows: Sequence[int], state: State) -> None:
        """Store a stack; a new row has the next free number."""

    def truncate(self, count: int) -> None:
        """Forget all rows but the first ``count``."""

    def export(self, count: int) -> State:
        """Return what a checkpoint must hold to find the first ``count`` rows again, all there are."""

    def committed(self) -> None:
        """Learn that the checkpoint with the latest export is complete: only it and the one before are still needed."""


class Resident:
    """Rows in one tensor per key, on ``device`` (by default the template's), with room for ``most`` in the end."""

    def __init__(self, template: State, most: int, device: str | None = None) -> None:
        self._most = most
        self._table = {k: v.new_empty((0, *v.shape), device=device or v.device) for k, v in template.items()}

    def read(self, rows: Sequence[int], into: State, at: Sequence[int]) -> None:
        """Copy rows into stacks, which may be on another device."""
        which = torch.tensor(rows, dtype=torch.int64)
        for key, stack in into.items():
            table = self._table[key]
            if len(at) == len(stack) and stack.device == table.device:
                torch.index_select(table, 0, which.to(table.device), out=stack)
            else:
                stack[list(at)] = table[which.to(table.device)].to(stack.device)

    def write(self, rows: Sequence[int], state: State) -> None:
        """Store stacks, which may be on another device."""
        for key, stack in state.items():
            table = self._table[key]
            if max(rows) >= len(table):
                table = self._table[key] = _grown(table, max(rows) + 1, self._most)
            table[list(rows)] = stack.to(table.device)

    def truncate(self, count: int) -> None:
        """Keep the room: rows come and go."""

    def export(self, count: int) -> State:
        """Return the table."""
        return {k: v[:count] for k, v in self._table.items()}

    def committed(self) -> None:
        """Nothing depends on it: an export holds the rows themselves."""


def _grown(table: Tensor, rows: int, most: int) -> Tensor:
    """Return the table with room for at least ``rows`` rows; doubling keeps growth cheap."""
    # Not zeros: a page of host memory that was never written takes no room.
    larger = table.new_empty((min(max(rows, 2 * len(table)), max(rows, most)), *table.shape[1:]))
    larger[: len(table)] = table
    return larger


class OnDisk:
    """Rows in a file that grows with the rows seen; without ``path`` in a temporary one that no one else sees.

    The file is a sequence of slots, and rows are copied on write: a slot that the last checkpoint refers to is never
    overwritten. A changed row goes to a free slot, where later changes overwrite it, and when the next checkpoint is
    complete the old slot becomes free. So a crash at any moment leaves the rows of the last checkpoint as they were,
    a checkpoint holds slot numbers only, and the file has at most three times as many slots as there are rows (four
    times, should a checkpoint fail and the run go on).

    Every row has a checksum, which is kept here and in checkpoints and looked at whenever the row is read: what a disk
    or a hand has changed in the file is an error, not a result.

    Reads and writes are plain calls, not a memory map: a map would count in full against a limit on address space,
    and a full disk or a damaged file would be a signal that kills the process, not an error.
    """

    def __init__(self, template: State, path: Path | None) -> None:
        self._template = template
        self._start: dict[str, int] = {}  # of each key in a slot
        self._row_bytes = 0
        for key, value in template.items():
            self._start[key] = self._row_bytes
            self._row_bytes += value.nbytes
        self._slot_bytes = -(-self._row_bytes // PAGE) * PAGE
        self._path = path
        self._called = str(path or f"a temporary file in {tempfile.gettempdir()} for the memory of clients")
        self._file: FileIO | None = None
        self._slot: dict[int, int] = {}  # of each row
        self._sum: dict[int, int] = {}  # of each row, but for those of a checkpoint that has none
        self._end = 0  # slots in the file
        self._free: list[int] = []
        self._kept: frozenset[int] = frozenset()  # slots of the last complete checkpoint
        self._older: frozenset[int] = frozenset()  # slots of the checkpoint before it
        self._offered: frozenset[int] = frozenset()  # slots of the latest export

    def read(self, rows: Sequence[int], into: State, at: Sequence[int]) -> None:
        """Copy rows from the file straight into stacks in host memory; others are reached through one row of it."""
        sums = dict.fromkeys(rows, 0)
        for key in self._start:
            stack = into[key]
            over = None if stack.device.type == "cpu" else _staging(stack)
            for row, i in zip(rows, at, strict=True):
                sums[row] = self._move(os.preadv, stack[i] if over is None else over, self._slot[row], key, sums[row])
                if over is not None:
                    stack[i].copy_(over)
        for row, found in sums.items():
            if self._sum.get(row, found) != found:
                raise RunFolderError(
                    f"{self._called} does not hold what was written to slot {self._slot[row]}: it was damaged; "
                    "restore it or start a new run"
                )

    def write(self, rows: Sequence[int], state: State) -> None:
        """Write stacks, each row to where the last checkpoint has nothing."""
        slots, sums = [self._writable(row) for row in rows], [0] * len(rows)
        for key in self._start:
            for i, (row, slot) in enumerate(zip(state[key], slots, strict=True)):
                sums[i] = self._move(os.pwritev, row.detach().cpu().contiguous(), slot, key, sums[i])
        self._slot.update(zip(rows, slots, strict=True))
        self._sum.update(zip(rows, sums, strict=True))

    def truncate(self, count: int) -> None:
        """Forget rows; their slots become free when no checkpoint needs them any more."""
        for row in [row for row in self._slot if row >= count]:
            del self._slot[row]
            self._sum.pop(row, None)

    def export(self, count: int) -> State:
        """Bring all rows to the disk and return slots and checksums; none is overwritten until the next export.

        A temporary file is gone with the process, so of that one the rows themselves are returned.
        """
        if self._path is None:
            table = {k: v.new_empty((count, *v.shape), device="cpu") for k, v in self._template.items()}
            self.read(range(count), table, range(count))
            return table
        if self._file is not None:
            with self._explained():
                os.fsync(self._file.fileno())
        slots = [self._slot[row] for row in range(count)]
        self._offered = frozenset(slots)
        self._recount()
        exported = {SLOTS: torch.tensor(slots, dtype=torch.int64)}
        if len(self._sum) == count:
            exported[SUMS] = torch.tensor([self._sum[row] for row in range(count)], dtype=torch.int64)
        return exported

    def committed(self) -> None:
        """Free the slots that only checkpoints before the last two needed."""
        self._older, self._kept = self._kept, self._offered
        self._recount()

    def adopt(self, slots: Sequence[int], sums: Sequence[int] = ()) -> None:
        """Take over the file of a checkpoint that found its rows in ``slots``; what else is in it was never kept.

        A checkpoint of an earlier version has no ``sums``: its rows are taken as they are.
        """
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0 or (sums and len(sums) != len(slots)):
            raise RunFolderError(f"the checkpoint's places in {self._called} make no sense: start a new run")
        self._slot, self._sum = dict(enumerate(slots)), dict(enumerate(sums))
        self._end = max(slots, default=-1) + 1
        if self._end:
            needed = (self._end - 1) * self._slot_bytes + self._row_bytes
            self._open("r+b", needed)
        self._offered = frozenset(slots)
        self.committed()

    def _recount(self) -> None:
        used = self._older | self._kept | self._offered | set(self._slot.values())
        self._free = [slot for slot in reversed(range(self._end)) if slot not in used]

    def _writable(self, row: int) -> int:
        slot = self._slot.get(row)
        # A row that is still where a complete checkpoint has it was there at the latest export too.
        if slot is not None and slot not in self._offered:
            return slot
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1

    def _move(self, call: Callable[..., int], row: Tensor, slot: int, key: str, sum_before: int) -> int:
        """Let ``os.preadv`` or ``os.pwritev`` move one key of a row, and return the checksum up to there.

        Either may stop half way and is called again.
        """
        file = self._file or self._open("w+b")
        left: NDArray[np.uint8] = row.view(-1).view(torch.uint8).numpy()
        whole = left
        offset = slot * self._slot_bytes + self._start[key]
        while left.size:
            with self._explained():
                done = call(file.fileno(), [left], offset)
            if not done:
                raise RunFolderError(f"{self._called} ends before slot {slot}: it was cut off while in use")
            left, offset = left[done:], offset + done
        return zlib.crc32(whole.data, sum_before)

    def _open(self, mode: str, needed: int = 0) -> FileIO:
        """Open the file: a new one, or the one that a checkpoint ``needed``. Before that nothing is on the disk."""
        with self._explained():
            if self._path is None:
                file = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115
            else:
                self._path.parent.mkdir(exist_ok=True)
                file = FileIO(self._path, mode)
            self._file = file
            weakref.finalize(self, file.close)
            size = os.fstat(file.fileno()).st_size
            if size < needed:
                raise RunFolderError(
                    f"{self._called} has {size} bytes, but the checkpoint needs {needed}: "
                    "it was changed; restore it or start a new run"
                )
            file.truncate(self._end * self._slot_bytes)
            return file

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an operating-system error about the file into one that says what to do."""
        try:
            yield
        except FileNotFoundError:
            raise RunFolderError(f"{self._called} is missing: restore it or start a new run") from None
        except OSError as error:
            if self._path is not None:
                raise unusable(self._path, error.errno, error.strerror) from error
            remedy = "free some disk space, set TMPDIR, or give the run a folder"
            raise RunFolderError(f"{self._called} cannot be used: {error.strerror}; {remedy}") from error


def _staging(stack: Tensor) -> Tensor:
    """Return room for one row in host memory; pinned, the copy to a GPU is faster."""
    return torch.empty(stack.shape[1:], dtype=stack.dtype, pin_memory=stack.is_cuda)
