"""What a run folder says about its experiment: what leaves the clients, who holds what, hashes of what was given."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from feddpc.data import Dataset
from feddpc.experiment import Experiment
from feddpc.methods.base import Method

#: Clients times classes up to which a run folder says who holds what.
MOST_HOLDINGS = 250_000


def privacy_note(experiment: Experiment, method: Method) -> dict[str, Any]:
    """Return what leaves a client besides its updates, in words and numbers."""
    mechanism = experiment.policies.privacy
    note = method.privacy if mechanism is None else f"{method.privacy} {mechanism.describe()}"
    return {"note": note, "disclosed": dict(experiment.world.disclosed) if experiment.world else {}}


def holdings(experiment: Experiment) -> dict[str, Any]:
    """Return how many samples of which class each client holds; nothing where that is too much, or no classes."""
    data, partition = experiment.data, experiment.partition
    if data.target != "classes" or len(partition) * data.classes > MOST_HOLDINGS:
        return {}
    names = data.class_names or [str(c) for c in range(data.classes)]
    return {"classes": list(names), "counts": partition.counts(data.y_train, data.classes).tolist()}


def hashes_of(experiment: Experiment) -> dict[str, str]:
    """Return a hash of each thing that a configuration only names: data, partition, model.

    ``data`` is what runs before 0.2 noted, of a sample; ``all data`` of everything.
    """
    flat, partition = experiment.task.flat, experiment.planner.partition
    layout = [f"{n} {tuple(s)}" for n, s in zip(flat.names, flat.shapes, strict=True)]
    frozen = [p.detach().cpu().numpy() for p in flat.frozen().values()]
    return {
        "data": data_hash(experiment.data),
        "all data": experiment.data.digest,
        "partition": _hash(partition.order, partition.starts),
        "initial model": _hash(layout, experiment.w0.cpu().numpy(), *frozen),
    }


def data_hash(data: Dataset) -> str:
    """Return a hash of all labels and a few samples."""
    sample = np.linspace(0, len(data.x_train) - 1, 64).astype(np.int64)
    return _hash(data.x_train[sample], data.y_train, data.x_test.shape, data.y_test)


def _hash(*things: object) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for thing in things:
        digest.update(np.ascontiguousarray(thing).tobytes() if isinstance(thing, np.ndarray) else repr(thing).encode())
    return digest.hexdigest()
