"""Which of several processes this one is, as torchrun, SLURM or ``--ranks`` say it in the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from feddpc.errors import BadInputError


@dataclass(frozen=True)
class Place:
    """Which process this is, among all and among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place | None:
    """Return the place of this process if torchrun, ``--ranks`` or SLURM's ``srun`` has started it, else None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        return Place(rank, size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size))
    # Not SLURM_NTASKS, which a batch script has too, and its programs when no srun starts them.
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, size = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
        here = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        return Place(rank, size, _number("SLURM_LOCALID", 0), int(here[0]) if here else size)
    return None


def restarted() -> bool:
    """Return whether torchrun has started the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def refuse_ranks(what: str) -> None:
    """Raise if several ranks were started for something that one process does."""
    where = place()
    if where is not None and where.size > 1:
        raise BadInputError(
            f"{where.size} ranks were started, but {what} is for one process: ranks are for `feddpc run` and "
            "feddpc.simulate; `feddpc sweep --ranks` gives each of its runs several"
        )


def _number(name: str, usual: int | None = None) -> int:
    text = os.environ.get(name, "" if usual is None else str(usual))
    if not text.isdecimal():
        raise BadInputError(f"the environment variable {name} = {text!r} is no number: start ranks with torchrun")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,a2")
    ('gpu07', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else "127.0.0.1"
