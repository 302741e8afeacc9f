"""Time that has really passed on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[float, T]:
    """Run ``work``; return how long it took, with everything it left running on ``device``, and what it gave."""
    wait(device)
    began = time.perf_counter()
    given = work()
    wait(device)
    return time.perf_counter() - began, given


def wait(device: torch.device | str) -> None:
    """Wait until ``device`` has nothing more to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
