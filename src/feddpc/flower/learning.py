"""What a method learns from all clients before round 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData, require_asking
from feddpc.runs import checkpoint
from feddpc.runs.record import LEARNED


def learn_by_asking(
    method: Method, ask: Callable[..., dict[int, State]], data: FederatedData, sizes: Ints, folder: Path | None
) -> State:
    """Return what ``method`` learns by asking clients with ``ask``; a run that is continued has it in its folder."""
    path = None if folder is None else folder / LEARNED
    if path is not None and path.exists():
        return checkpoint.load_model(path)
    try:
        learned = require_asking(method, method.name).learn_by_asking(ask, data, sizes)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise BadInputError(
            f"{method.name}: what the clients answered before round 1 does not fit together: {error}"
        ) from error
    learned = {key: value.detach().cpu().contiguous() for key, value in learned.items()}
    if path is not None and learned:
        checkpoint.save_model(path, learned)
    return learned
