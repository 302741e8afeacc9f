"""Stopping a run after the current round, on Ctrl-C or because a caller asks."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType


class Stop:
    """A request to stop after the current round."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C (or SIGTERM) of our program into a request to stop; the second interrupts at once."""
        with self._handling(signal.SIGINT, signal.SIGTERM):
            yield

    @contextmanager
    def on_callers_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C in a user's program into a request to stop, and say so; the second interrupts at once.

        SIGTERM is the caller's, and so is Ctrl-C if the caller has a handler for it.
        """
        own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with nullcontext() if own else self._handling(signal.SIGINT, tell=True):
            yield

    @contextmanager
    def _handling(self, *numbers: signal.Signals, tell: bool = False) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(_number: int, _frame: FrameType | None) -> None:
            if self.wanted:
                raise KeyboardInterrupt
            self.wanted = True
            if tell:
                with suppress(RuntimeError, OSError):  # the signal may have come in the middle of another print
                    print("stopping after this round; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)

        before = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
