"""What a configuration sets for the whole process, and how a process gets back what it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def preserve_torch_globals() -> Iterator[None]:
    """Put back, in the end, what the functions below set."""
    threads = torch.get_num_threads()
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    repeatable = torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
        torch.backends.cudnn.deterministic = repeatable


def set_precision(precision: str) -> None:
    """Let matrix units round to 10 bits of mantissa only where asked to: by itself, torch does so in convolutions.

    And let sums in convolutions be taken in one order only, so that a run can be made again to the last bit.
    """
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def choose_threads(asked: int | Literal["auto"] | None, step_work: int) -> int | None:
    """Return how many threads torch is to use; None, the default, leaves them as they are.

    ``auto`` takes one where a local step is little work: there a second thread gains nothing on an idle machine, and
    on a busy one every operation waits for it, which was seen to cost a factor of twenty.
    """
    if asked != "auto":
        return asked
    return 1 if step_work < 1 << 22 else torch.get_num_threads()
