"""Flower's wrappers for differential privacy, inside of which the methods here must not run."""

from __future__ import annotations

import sys
from types import FrameType

from flwr.serverapp.strategy import Strategy

from feddpc.errors import BadInputError

#: What a wrapper calls on the strategy that it holds, before any client trains.
CALLS = ("summary", "configure_train")


def refuse_privacy_wrappers(strategy: Strategy) -> None:
    """Raise if ``strategy`` is called by a wrapper that adds differential privacy.

    Such a wrapper clips what clients send and adds noise for that length. A method that stretches updates afterwards
    (FedDPC by up to 1 + lambda), or remembers them without noise, makes the noise too small for the promised epsilon.
    A wrapper tells the strategy nothing about itself, but it is among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Locals are looked at in these functions only: in others a look would keep replies in memory.
        caller = frame.f_locals.get("self") if frame.f_code.co_name in CALLS else None
        if isinstance(caller, Strategy) and caller is not strategy and _adds_noise(caller):
            raise BadInputError(
                f"{type(caller).__name__} around {type(strategy).__name__}: it clips what clients send, and the method "
                "changes the length of the updates afterwards, so the noise would be too small for the promised "
                "epsilon. Use feddpc.flower.strategy(..., privacy={...}) with feddpc.flower.client_app, which clips "
                "after the method, or wrap Flower's own FedAvg"
            )
        frame = frame.f_back


def _adds_noise(strategy: Strategy) -> bool:
    """Return whether a strategy is one of Flower's wrappers for differential privacy, or written like them."""
    names = (cls.__name__ for cls in type(strategy).__mro__)
    return hasattr(strategy, "noise_multiplier") or any(name.startswith("DifferentialPrivacy") for name in names)
