"""The configuration of a run: one flat, frozen record, read from TOML and flags, written back complete."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from feddpc.checks import coerce
from feddpc.errors import BadInputError, unknown

Options = dict[str, Any]
#: How `--set PREFIX.KEY=VALUE` reaches the options of a part.
PARTS = {
    "model": "model_options",
    "partition": "partition_options",
    "participation": "participation_options",
    "privacy": "privacy",
    "rule": "rule_options",
    "screen": "screen",
    "faults": "faults",
}
#: What a resumed run may have otherwise than before.
MAY_CHANGE = ("rounds", "client_memory")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes. ``auto`` and empty values are filled in before it starts.

    >>> Config.read({"rounds": 5, "method": "fedavg"}).rounds
    5
    """

    method: str = "feddpc"
    data: str = "digits"
    model: str = "auto"
    clients: int = 100
    cohort: int = 10
    partition: str = "dirichlet"
    alpha: float = 0.2
    participation: str = "uniform"
    dropout: float = 0.0
    weighting: Literal["uniform", "samples"] = "uniform"
    rule: str = "mean"
    rounds: int = 100
    lr: float = 0.1
    server_lr: float | None = None
    lr_decay: float = 1.0
    batch_size: int | None = None
    epochs: int = 1
    reserve: float | None = None
    validation: float = 0.0
    seed: int = 0
    scaling: Literal["auto", "half", "channel", "unit", "none"] = "auto"
    augment: bool = False
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    device: str = "auto"
    engine: str = "auto"
    compile: bool | Literal["auto"] = "auto"
    client_memory: Literal["auto", "device", "host", "disk"] = "auto"
    threads: int | Literal["auto"] | None = None
    hyper: Options = field(default_factory=dict)
    model_options: Options = field(default_factory=dict)
    partition_options: Options = field(default_factory=dict)
    participation_options: Options = field(default_factory=dict)
    privacy: Options = field(default_factory=dict)
    rule_options: Options = field(default_factory=dict)
    screen: Options = field(default_factory=dict)
    faults: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("clients", "cohort", "rounds", "epochs", "batch_size", "threads"):
            value = getattr(self, name)
            _require(value is None or value == "auto" or value >= 1, name, value, "at least 1")
        _require(not isinstance(self.threads, int) or self.threads <= 1024, "threads", self.threads, "at most 1024")
        _require(self.cohort <= self.clients, "cohort", self.cohort, f"at most clients = {self.clients}")
        for name in ("lr", "server_lr", "alpha", "lr_decay"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, name, value, "a finite number above 0")
        _require(0 <= self.dropout < 1, "dropout", self.dropout, "a probability in [0, 1)")
        reserve = 0.0 if self.reserve is None else self.reserve
        _require(0 <= reserve < 1, "reserve", self.reserve, "a share of the training set in [0, 1)")
        _require(0 <= self.validation < 1, "validation", self.validation, "a share of the training set in [0, 1)")
        alike = self.rule == "mean" or self.weighting == "uniform"
        _require(alike, "weighting", self.weighting, f"uniform with rule = {self.rule!r}, which counts clients alike")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Config:
        """Build a configuration from names and values, checking both."""
        hints = _hints()
        for key in values:
            if key not in hints:
                raise unknown("key", key, hints)
        return cls(**{k: _fit(k, v, hints[k]) for k, v in values.items()})

    def asdict(self) -> dict[str, Any]:
        """Return names and values; what is unset is left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """Say where ``given`` asks for something else than this configuration; ``auto`` asks for nothing."""
        own, given = _plain(self.asdict()), _plain(given)
        found = []
        for key, value in given.items():
            if isinstance(value, dict):
                found += [
                    f"{key}.{k} = {v!r}, was {own[key].get(k)!r}" for k, v in value.items() if own[key].get(k) != v
                ]
            elif value != "auto" and own.get(key) != value:
                found.append(f"{key} = {value!r}, was {own.get(key)!r}")
        return found


@functools.cache
def _hints() -> dict[str, Any]:
    """Return the types of all keys; looking them up takes longer than reading a configuration."""
    return typing.get_type_hints(Config)


def _plain(value: Any) -> Any:
    """Return ``value`` as TOML would give it back: lists for tuples."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _fit(key: str, value: Any, hint: Any) -> Any:
    if hint == Options:
        if not isinstance(value, dict):
            raise BadInputError(f"{key} = {value!r} must be a table of names and values")
        return dict(value)
    return coerce(key, value, hint)


def _require(holds: bool, name: str, value: object, domain: str) -> None:
    if not holds:
        raise BadInputError(f"{name} = {value!r}: must be {domain}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file, or say where it is wrong."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"there is no file {path}") from None
    except (ValueError, RecursionError, OSError) as error:  # a number may be too long, a list too deep
        raise BadInputError(f"{path} cannot be read as TOML: {error}") from None


def parse_set(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``; the value is read as TOML where that works, else as a plain word.

    >>> parse_set("lam=0.5"), parse_set("variant=fresh"), parse_set("scaling=false")
    (('lam', 0.5), ('variant', 'fresh'), ('scaling', False))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInputError(f"--set {text!r}: write KEY=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key.strip(), value.strip()
    plain = parsed.get("value")
    return key.strip(), plain if isinstance(plain, bool | int | float | str | list) and len(
        parsed
    ) == 1 else value.strip()


def write_toml(values: Mapping[str, Any]) -> str:
    """Return TOML text: plain values first, then one table for each dictionary.

    >>> print(write_toml({"lr": 0.1, "hyper": {"lam": 1.0, "guard": "zero"}}))
    lr = 0.1
    <BLANKLINE>
    [hyper]
    lam = 1.0
    guard = "zero"
    <BLANKLINE>
    """
    plain = [f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    tables = [
        "\n".join([f"[{k}]", *(f"{key} = {_toml(value)}" for key, value in v.items())])
        for k, v in values.items()
        if isinstance(v, dict) and v
    ]
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    # Strings, whole numbers and booleans are written alike in both, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
