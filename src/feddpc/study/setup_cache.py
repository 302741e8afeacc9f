"""What runs have in common (data set, partition, model on the device), built once per process."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from feddpc.build import construct
from feddpc.config import AFTER_SETUP_KEYS, Config, code_in
from feddpc.data import Dataset, names
from feddpc.data.loading import is_own, load_as
from feddpc.experiment import Experiment
from feddpc.registry import code_digest, is_code
from feddpc.runs.provenance import data_hash
from feddpc.task_parts import registered_code, targets_of

#: Number of experiments kept at a time; each has its data on the device.
CACHE_SIZE = 2
_cache: OrderedDict[str, Experiment] = OrderedDict()
#: Number of data sets kept at a time, counted per kind of targets that was asked for.
DATASETS = 8
_datasets: OrderedDict[Any, tuple[Dataset, str]] = OrderedDict()


class _DataOptions(dict[str, Any]):
    """Options of a data set, as part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


def dataset(config: Config) -> Dataset:
    """Return the data set of a configuration, the same object every time."""
    return _loaded(config)[0]


def fingerprint(config: Config) -> str:
    """Return a hash of the content of a configuration's data set."""
    return _loaded(config)[1]


def _place(name: str) -> tuple[Path | None, str]:
    """Return the folder that a path is relative to, and a hash of code; neither for a data set known by its name."""
    return None if name in names() else Path.cwd(), code_digest(name) if is_code(name) else ""


def _files(config: Config) -> tuple[tuple[str, int, int], ...]:
    """Return size and time of the files that data are read from, so that changed ones are read again.

    Of folders, those of the files and folders in them, two levels deep.
    """
    if config.data in names() or is_own(config.data):
        return ()
    options = [
        value for value in config.data_options.values() if value and isinstance(value, str)
    ]  # a table for testing
    named = [Path(value).expanduser() for value in (config.data, *options)]
    found = [path for place in named for path in (place, *place.glob("*"), *place.glob("*/*")) if path.exists()]
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found))


def _loaded(config: Config) -> tuple[Dataset, str]:
    """Return a data set and a hash of its content, from the cache where they were loaded before."""
    base, code = _place(config.data)
    place = (config.data, _DataOptions(config.data_options), base, code, _files(config))
    targets = targets_of(config.task)
    if (place, targets) not in _datasets:
        data = load_as(targets, config.data, config.data_options)
        while len(_datasets) >= DATASETS:
            _datasets.popitem(last=False)
        # Known data sets are checked when they are read, so that a sample of them suffices.
        content = data_hash(data) if config.data in names() else data.digest
        _datasets[place, targets] = data, content + code
        if targets is None:  # with the task that follows from the data, they are the same
            _datasets[place, data.target] = _datasets[place, None]
    _datasets.move_to_end((place, targets))
    return _datasets[place, targets]


def setup_key(config: Config) -> str:
    """Return a text that is equal for complete configurations whose runs share everything built before round 1.

    >>> setup_key(Config(lr=0.1)) == setup_key(Config(lr=0.2)), setup_key(Config()) == setup_key(Config(clients=50))
    (True, False)
    """
    shared = {k: v for k, v in config.asdict().items() if k not in AFTER_SETUP_KEYS}
    code = [code_digest(name) for name in code_in(shared)]
    return json.dumps([shared, code, registered_code(config)], sort_keys=True)


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
