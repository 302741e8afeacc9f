"""The protocol between server and nodes: both ends state the numbers that they speak, and need one in common.

A release of the library speaks the protocols from ``OLDEST`` to ``NEWEST``. So server and nodes can be upgraded one
after the other, in either order, as long as one number is common to both. A change of what messages hold, or of what a
node computes from them, gets a new number; a number is dropped only after a release that speaks both.
"""

from __future__ import annotations

import re

from feddpc._version import __version__
from feddpc.errors import FeddpcError

#: The protocols that this release speaks.
OLDEST, NEWEST = 1, 1
_STATED = re.compile(r"(\S{1,40}) protocol (\d{1,6})-(\d{1,6})")


class ProtocolError(FeddpcError):
    """Server and node have no protocol in common, and which of them to upgrade."""


def stated() -> str:
    """Return what this end says about itself in every message: its release, and the protocols that it speaks."""
    return f"{__version__} protocol {OLDEST}-{NEWEST}"


def agreed(theirs: object, them: str, us: str) -> int:
    """Return the newest protocol that both ends speak; raise if there is none.

    ``theirs`` is what the other end states; ``them`` and ``us`` say what the two ends are: ``the server``,
    ``this node``.

    >>> agreed("9.1.0 protocol 1-7", "the server", "this node")
    1
    >>> agreed("9.1.0 protocol 6-7", "the server", "this node")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    feddpc.flower.versions.ProtocolError: the server runs feddpc 9.1.0 with protocols 6 to 7, this node ...
    """
    ours = f"{us} {_describe(__version__, OLDEST, NEWEST)}"
    found = _STATED.fullmatch(theirs) if isinstance(theirs, str) else None
    if found is None:
        raise ProtocolError(f"{them} states the version {theirs!r:.80}, without a protocol; {ours}: upgrade {them}")
    release, oldest, newest = found[1], int(found[2]), int(found[3])
    common = min(newest, NEWEST)
    if common < max(oldest, OLDEST):
        older = us if oldest > NEWEST else them
        raise ProtocolError(f"{them} {_describe(release, oldest, newest)}, {ours}: upgrade {older}")
    return common


def _describe(release: str, oldest: int, newest: int) -> str:
    numbers = f"protocols {oldest} to {newest}" if newest > oldest else f"protocol {oldest}"
    return f"runs feddpc {release} with {numbers}"
