"""One run of a study: its configuration, and the key that names its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from feddpc import methods
from feddpc.config import EXECUTION_KEYS, OPTION_TABLES, Config, code_in
from feddpc.registry import code_digest, is_code, short_name
from feddpc.resolve import resolve
from feddpc.study.setup_cache import dataset, fingerprint
from feddpc.task_parts import registered_code


@dataclass(frozen=True)
class RunSpec:
    """One run of a study. ``label`` and ``tags`` do not tell runs apart; the key does.

    Runs that are ``extendable`` and differ only in their rounds are one run, which keeps its last checkpoint: it is
    continued if more rounds are asked for, and read up to the round that is asked for.

    >>> a, b = RunSpec(Config(lr=0.1)), RunSpec(Config(lr=0.1, server_lr=0.1, engine="loop"), label="again")
    >>> a.key == b.key, a.key == RunSpec(Config(lr=0.2)).key
    (True, False)
    >>> RunSpec(Config(rounds=5), extendable=True).key == RunSpec(Config(rounds=9), extendable=True).key
    True
    """

    config: Config
    label: str = ""
    tags: Mapping[str, Any] = field(default_factory=dict)
    extendable: bool = False

    @cached_property
    def complete(self) -> Config:
        """The configuration, filled in and checked; missing data are an error that names the remedy."""
        resolved = resolve(self.config, dataset(self.config))
        methods.create(resolved.method, **resolved.hyper).init_server(torch.zeros(1), resolved.clients)
        return resolved

    @cached_property
    def key(self) -> str:
        """A hash of everything that decides the numbers: equal for runs with equal results, on every machine."""
        defaults = type(self.config)().asdict()  # left out, so that a key added later does not change the hash
        values = {k: v for k, v in self.decisive().items() if k not in defaults or v != defaults[k]}
        code = {
            k: ",".join(_source(name) for name in v.split(","))  # metrics are several names
            for k, v in values.items()
            if isinstance(v, str) and code_in({k: v})
        }
        registered = registered_code(self.complete)
        parts = [
            fingerprint(self.config),
            _source(self.config.method),
            values | code,
            *filter(None, [registered, self.extendable]),
        ]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    def decisive(self) -> dict[str, Any]:
        """Return the values that decide the numbers, apart from the method and the data themselves."""
        # The options of the partition hold alpha, if the partition has it.
        left_out = (*EXECUTION_KEYS, "data", "method", "alpha", *(("rounds",) if self.extendable else ()))
        return {k: v for k, v in self.complete.asdict().items() if k not in left_out}

    @property
    def name(self) -> str:
        """The label, or method and seed."""
        return self.label or f"{self.config.method} seed {self.config.seed}"


def _source(name: str) -> str:
    """Return what identifies a method, a model, a loss: its name, for the user's own with the file's content."""
    return f"{short_name(name)} in {code_digest(name)}" if is_code(name) else name


def settings(config: Config) -> dict[str, Any]:
    """Return what decides the numbers except method and seed, spelled as on the command line.

    Hyper-parameters are ``hyper.NAME``. Values that follow from another value are left out.

    >>> {k: v for k, v in settings(Config(hyper={"lam": 1.0}, server_lr=0.1)).items() if k in ("lr", "hyper.lam")}
    {'lr': 0.1, 'hyper.lam': 1.0}
    """
    values = config.asdict()
    tables = {"hyper": "hyper", **OPTION_TABLES}
    plain = {k: v for k, v in values.items() if k not in (*EXECUTION_KEYS, *tables.values(), "method", "seed")}
    plain |= {f"{part}.{k}": v for part, name in tables.items() for k, v in values[name].items()}
    for follower, leader in (("server_lr", "lr"), ("partition.alpha", "alpha")):
        if plain.get(follower) == plain[leader]:
            del plain[follower]
    return plain
