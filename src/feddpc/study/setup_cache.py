"""What items have in common, built once in a process: data sets, partitions, models on the device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import torch

from feddpc.config import Config
from feddpc.data import Dataset, load, names
from feddpc.experiment import Setting, data_hash, prepare
from feddpc.torch_globals import set_precision

#: Settings kept at a time; each has its data on the device.
KEPT = 2
#: What may differ between runs in one world.
FREE = ("method", "hyper", "lr", "server_lr", "lr_decay", "weighting", "rounds", "engine", "client_memory")
_RATES = ("server_lr", "lr_decay", "weighting")
_kept: OrderedDict[str, Setting] = OrderedDict()


def dataset(name: str) -> Dataset:
    """Return a data set, the same object every time."""
    return _loaded(name, _where(name))[0]


def fingerprint(name: str) -> str:
    """Return a hash of a data set's content."""
    return _loaded(name, _where(name))[1]


def _where(name: str) -> Path | None:
    """Return where a path begins; a data set that has a name is the same everywhere."""
    return None if name in names() else Path.cwd()


@lru_cache(maxsize=4)
def _loaded(name: str, _where: Path | None) -> tuple[Dataset, str]:
    data = load(name)
    return data, data_hash(data)


def world(config: Config) -> str:
    """Return a text that is equal for complete configurations whose runs share all that is built before round 1."""
    return json.dumps({k: v for k, v in config.asdict().items() if k not in FREE}, sort_keys=True)


def digest(config: Config) -> str:
    """Return a short hash of a world.

    >>> digest(Config(lr=0.1)) == digest(Config(lr=0.2)), digest(Config()) == digest(Config(clients=50))
    (True, False)
    """
    return hashlib.blake2b(world(config).encode(), digest_size=8).hexdigest()


def setting(config: Config) -> Setting:
    """Return the setting of a complete configuration; what an earlier one had built is used again."""
    name = world(config) + fingerprint(config.data)
    if name in _kept:
        _kept.move_to_end(name)
        found = _kept[name]
        set_precision(config.precision)
        if isinstance(found.config.threads, int):
            torch.set_num_threads(found.config.threads)
    else:
        while len(_kept) >= KEPT:
            _kept.popitem(last=False)
        found = _kept[name] = prepare(config, data=dataset(config.data))
    own = {key: getattr(config, key) for key in FREE}
    rates = {key: getattr(config, key) for key in _RATES}
    return dataclasses.replace(
        found,
        config=dataclasses.replace(found.config, **own),
        federation=dataclasses.replace(found.federation, client_lr=config.lr, **rates),
    )
