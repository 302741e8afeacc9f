"""Masks from a stream cipher, in the place of Flower's.

Flower 1.41 draws masks from NumPy's Mersenne Twister with a seed of 32 bits, into which it folds the secret; of a key
that two nodes agreed on, 28 bits are left. Whoever holds the masked vectors could try them all. Here the secret is
hashed to the key of ChaCha20, and its key stream is the mask. Everything else of the protocol is Flower's.

Flower has no place to say so. What draws masks there is therefore taken as it is, with another generator under the name
by which it calls its own; Flower's modules themselves are not changed.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.client.mod.secure_aggregation.secaggplus_mod import _collect_masked_vectors, secaggplus_mod
from flwr.server.workflow import SecAggPlusWorkflow
from numpy.typing import NDArray

from feddpc.errors import BadInputError

F = TypeVar("F", bound=Callable[..., Any])


def masks(seed: bytes, num_range: int, shapes: list[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Return arrays of uniform integers below ``num_range``, a power of two of at most 2^32, that ``seed`` determines.

    >>> masks(b"secret", 1 << 32, [(2,), (1,)])
    [array([3223788683, 1970857441]), array([3017614002])]
    """
    key = hashlib.sha256(b"feddpc secure aggregation, masks" + seed).digest()
    stream = Cipher(
        ChaCha20(key, nonce=bytes(16)), mode=None
    ).encryptor()  # a key is used once: they are new every round
    sizes = [int(np.prod(shape)) for shape in shapes]
    words = np.frombuffer(stream.update(bytes(4 * sum(sizes))), "<u4").astype(np.int64) & (num_range - 1)
    parts = np.split(words, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def rebound(function: F, **names: object) -> F:
    """Return a function that finds other things under some names of its module.

    >>> import statistics
    >>> rebound(statistics.fmean, fsum=max)([1.0, 4.0])  # the largest over how many there are
    2.0
    """
    for name in names:
        if name not in function.__code__.co_names:
            raise BadInputError(f"this Flower's {function.__name__} does not use {name}: install feddpc[flower]")
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    return made  # type: ignore[return-value]


#: Flower's modifier of client apps, with these masks.
masking_mod = rebound(secaggplus_mod, _collect_masked_vectors=rebound(_collect_masked_vectors, pseudo_rand_gen=masks))
#: Flower's last stage at the server, with these masks.
unmask_stage = rebound(SecAggPlusWorkflow.unmask_stage, pseudo_rand_gen=masks)
