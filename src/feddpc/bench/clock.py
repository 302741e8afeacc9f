"""Wall-clock time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[float, T]:
    """Run ``work``; return its seconds, including everything it left running on ``device``, and its result."""
    wait(device)
    began = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - began, result


def wait(device: torch.device | str) -> None:
    """Wait until ``device`` has nothing more to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
