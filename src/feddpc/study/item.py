"""One run of a sweep: a configuration, and the key under which its results are found again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from feddpc import experiment, methods
from feddpc.config import PARTS, Config
from feddpc.experiment import make_method
from feddpc.method_setup import with_reserve
from feddpc.study.setup_cache import dataset, fingerprint

#: These decide where and how fast a run is made, not what comes out.
HOW = ("engine", "device", "threads", "client_memory")


@dataclass(frozen=True)
class Item:
    """One run to be made. ``label`` and ``tags`` are for people and tables; they do not tell runs apart.

    >>> a, b = Item(Config(lr=0.1)), Item(Config(lr=0.1, server_lr=0.1, engine="loop"), label="again")
    >>> a.key == b.key, a.key == Item(Config(lr=0.2)).key
    (True, False)
    """

    config: Config
    label: str = ""
    tags: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def complete(self) -> Config:
        """The configuration, filled in and checked; data that are absent are an error with the remedy."""
        method, config = make_method(self.config)
        method.init_server(torch.zeros(1), config.clients)
        return experiment.complete(with_reserve(config, [method]), dataset(config.data))

    @cached_property
    def key(self) -> str:
        """A hash of all that decides the numbers: equal for runs with equal results, also on another machine."""
        usual = type(self.config)().asdict()  # left out, so that a key of the configuration that is new changes nothing
        values = {k: v for k, v in self.decisive().items() if k not in usual or v != usual[k]}
        text = json.dumps([fingerprint(self.config.data), _source(self.config.method), values], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    def decisive(self) -> dict[str, Any]:
        """Return the values that decide the numbers, beside the method and the data themselves."""
        # The options of the partition hold alpha, if the partition has it.
        left_out = (*HOW, "data", "method", "alpha")
        return {k: v for k, v in self.complete.asdict().items() if k not in left_out}

    @property
    def name(self) -> str:
        """The label, or what stands for it."""
        return self.label or f"{self.config.method} seed {self.config.seed}"


def check(items: Iterable[Item]) -> None:
    """Raise what is wrong with any of the items, or absent, before anything is run or written."""
    for item in items:
        _ = item.key


def _source(method: str) -> str:
    """Return what a method is: its name, or the contents of the file it comes from."""
    if ".py" not in method:
        return method
    path, _, _ = method.partition(":")
    code = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    return f"{methods.get(method).__name__} in {code}"


def settings(config: Config) -> dict[str, Any]:
    """Return what decides the numbers but for method and seed, spelled as the command line spells it.

    Hyper-parameters are ``hyper.NAME``. What follows from another value is left out.

    >>> {k: v for k, v in settings(Config(hyper={"lam": 1.0}, server_lr=0.1)).items() if k in ("lr", "hyper.lam")}
    {'lr': 0.1, 'hyper.lam': 1.0}
    """
    values = config.asdict()
    tables = {"hyper": "hyper", **PARTS}
    plain = {k: v for k, v in values.items() if k not in (*HOW, *tables.values(), "method", "seed")}
    plain |= {f"{part}.{k}": v for part, name in tables.items() for k, v in values[name].items()}
    for follower, leader in (("server_lr", "lr"), ("partition.alpha", "alpha")):
        if plain.get(follower) == plain[leader]:
            del plain[follower]
    return plain


def with_how(config: Config, asked: Config) -> Config:
    """Return ``config`` made in the way that ``asked`` asks for."""
    return dataclasses.replace(config, **{key: getattr(asked, key) for key in HOW})
