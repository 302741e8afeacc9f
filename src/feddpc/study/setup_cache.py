"""What runs have in common (data set, partition, model on the device), built once per process."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import Any

from feddpc.build import construct
from feddpc.config import AFTER_SETUP_KEYS, Config, code_in
from feddpc.data import Dataset, load, names
from feddpc.experiment import Experiment, data_hash
from feddpc.registry import code_digest, is_code

#: Number of experiments kept at a time; each has its data on the device.
CACHE_SIZE = 2
_cache: OrderedDict[str, Experiment] = OrderedDict()


class _DataOptions(dict[str, Any]):
    """Options of a data set, as part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


def dataset(config: Config) -> Dataset:
    """Return the data set of a configuration, the same object every time."""
    return _loaded(config.data, _DataOptions(config.data_options), *_place(config.data))[0]


def fingerprint(config: Config) -> str:
    """Return a hash of the content of a configuration's data set."""
    return _loaded(config.data, _DataOptions(config.data_options), *_place(config.data))[1]


def _place(name: str) -> tuple[Path | None, str]:
    """Return the folder that a path is relative to, and a hash of code; neither for a data set known by its name."""
    return None if name in names() else Path.cwd(), code_digest(name) if is_code(name) else ""


@lru_cache(maxsize=4)
def _loaded(name: str, options: _DataOptions, _base: Path | None, code: str) -> tuple[Dataset, str]:
    data = load(name, **options)
    return data, data_hash(data) + code


def setup_key(config: Config) -> str:
    """Return a text that is equal for complete configurations whose runs share everything built before round 1.

    >>> setup_key(Config(lr=0.1)) == setup_key(Config(lr=0.2)), setup_key(Config()) == setup_key(Config(clients=50))
    (True, False)
    """
    shared = {k: v for k, v in config.asdict().items() if k not in AFTER_SETUP_KEYS}
    return json.dumps([shared, [code_digest(name) for name in code_in(shared)]], sort_keys=True)


def experiment(config: Config) -> Experiment:
    """Return the experiment of a resolved configuration, from the cache where an earlier run has built it."""
    name = setup_key(config) + fingerprint(config)
    if name in _cache:
        _cache.move_to_end(name)
    else:
        while len(_cache) >= CACHE_SIZE:
            _cache.popitem(last=False)
        _cache[name] = construct(config, dataset(config))
    return dataclasses.replace(_cache[name], config=config)
