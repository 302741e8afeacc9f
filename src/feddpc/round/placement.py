"""Where the engine keeps what it remembers of clients: on the device, in host memory or on disk. Results are the same.

>>> GB = 10**9
>>> decide(1 * GB, device_free=8 * GB, host_free=16 * GB), decide(9 * GB, device_free=8 * GB, host_free=16 * GB)
('device', 'disk')
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from feddpc.methods.base import Method, State
from feddpc.round.row_storage import OnDisk, Resident, RowStore

Kind = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """A kind of memory, and the folder of the run's checkpoints, where files go; without one they are temporary."""

    kind: Kind = "device"
    folder: Path | None = None
    part: str = ""  #: of several processes, what tells the files of this one from those of others

    def rows(self, template: State, population: int, name: str) -> RowStore:
        """Return an empty store for rows like ``template``; nothing is on the disk before the first row is."""
        if self.kind == "disk":
            return self.file(template, name)
        return Resident(template, population, "cpu" if self.kind == "host" else None)

    def file(self, template: State, name: str) -> OnDisk:
        """Return a store on disk."""
        return OnDisk(template, self.folder / self.file_name(name) if self.folder else None)

    def file_name(self, name: str) -> str:
        """Return the name of the file with the rows of a table."""
        return f"{name}{self.part}.rows"


def part_of(rank: int, size: int) -> str:
    """Return what tells the files of one of several processes from those of the others.

    >>> part_of(0, 1), part_of(1, 4)
    ('', '.1-of-4')
    """
    return "" if size == 1 else f".{rank}-of-{size}"


ON_DEVICE = Placement()


def resolve(asked: Kind | Literal["auto"], method: Method, w: Tensor, population: int) -> Kind:
    """Return the kind of memory for a method and a model; ``auto`` becomes what suits the size and this machine."""
    if asked != "auto":
        return asked
    row = sum(v.nbytes for state in (method.init_slot(w), method.init_client(w)) for v in state.values())
    host = available_memory()
    device = torch.cuda.mem_get_info(w.device)[0] if w.is_cuda else host
    return decide(row * population, device_free=device, host_free=host)


def decide(needed: int, *, device_free: int, host_free: int) -> Kind:
    """Return where ``needed`` bytes go: a quarter of the free device, else half of the free host memory, else disk.

    The rest of the device is for training; and while a table grows, the old one and the new one are both there.
    """
    if 4 * needed <= device_free:
        return "device"
    return "host" if 2 * needed <= host_free else "disk"


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that can be had without swapping, as well as the system tells."""
    kilobytes = _number(root / "proc/meminfo", "MemAvailable:")
    available = 1024 * kilobytes if kilobytes else _pages()
    group = root / "sys/fs/cgroup"
    limit = _number(group / "memory.max")  # of a container
    if limit is None:
        return available
    # What is in use, without cached files that were not read lately: they are dropped when memory is short.
    used = (_number(group / "memory.current") or 0) - (_number(group / "memory.stat", "inactive_file") or 0)
    return min(available, max(0, limit - used))


def _number(path: Path, field: str = "") -> int | None:
    """Return the number in a file of the system, or the one that follows ``field``; None if there is none."""
    try:
        words = path.read_text().split()
        return int(words[words.index(field) + 1 if field else 0])
    except (OSError, ValueError, IndexError):
        return None


def _pages() -> int:
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
    return 1 << 32  # nothing is known: a small machine
