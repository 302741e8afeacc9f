"""Every random choice of the library: streams keyed by what the choice is for, never global state.

A stream is a function of (seed, purpose, round, client). So all methods of a comparison see the same partition, initial
model, participants and batches, a resumed run equals an uninterrupted one, and every engine trains on the same batches.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator that belongs to ``seed``, ``purpose`` and ``keys`` (usually round, then client).

    >>> bool(generator(0, "batches", 3, 7).integers(100) == generator(0, "batches", 3, 7).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=_digest(seed, purpose, keys)))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return the 63-bit seed for a torch generator that belongs to ``seed``, ``purpose`` and ``keys``."""
    return _digest(seed, purpose, keys) >> 65


def _digest(seed: int, purpose: str, keys: tuple[int, ...]) -> int:
    text = f"{seed}/{purpose}/{'/'.join(str(int(k)) for k in keys)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
