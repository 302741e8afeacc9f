"""Refusing Flower's wrappers for differential privacy, which would promise too much around a method of this library."""

from __future__ import annotations

import sys
from types import FrameType

from flwr.serverapp.strategy import Strategy

from feddpc.errors import BadInputError

#: What Flower's privacy wrappers call on the strategy that they wrap, before any client trains.
WRAPPER_CALLS = ("summary", "configure_train")


def refuse_privacy_wrappers(strategy: Strategy) -> None:
    """Raise if a Flower wrapper for differential privacy calls ``strategy``.

    Such a wrapper clips the replies and adds noise for that length. A method that stretches updates afterwards (FedDPC
    by up to 1 + lambda), or stores them without noise, makes the noise too small for the promised epsilon. A wrapper
    does not tell the strategy that it is there, but it is among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only the locals of these functions are read: reading others would keep replies in memory.
        caller = frame.f_locals.get("self") if frame.f_code.co_name in WRAPPER_CALLS else None
        if isinstance(caller, Strategy) and caller is not strategy and _adds_noise(caller):
            raise BadInputError(
                f"{type(caller).__name__} around {type(strategy).__name__}: it clips what clients send, and the method "
                "changes the length of the updates afterwards, so the noise would be too small for the promised "
                "epsilon. Give the strategy privacy={...}, which clips after the method, or wrap Flower's own FedAvg"
            )
        frame = frame.f_back


def _adds_noise(strategy: Strategy) -> bool:
    """Return whether a strategy is one of Flower's wrappers for differential privacy, or is written like them."""
    names = (cls.__name__ for cls in type(strategy).__mro__)
    return hasattr(strategy, "noise_multiplier") or any(name.startswith("DifferentialPrivacy") for name in names)
