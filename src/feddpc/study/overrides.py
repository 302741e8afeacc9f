"""Configuration values and hyper-parameters that flags and files ask for, for one method or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc import methods
from feddpc.config import OPTION_TABLES, PLAIN_KEYS, Config
from feddpc.errors import BadInputError, unknown


@dataclass
class Overrides:
    """What replaces the defaults: configuration values, and hyper-parameters by method."""

    values: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set(self, key: str, value: Any, names: Sequence[str]) -> None:
        """Apply one ``--set``: a hyper-parameter, METHOD.KEY, PART.KEY, or any other key of the configuration."""
        part, dot, rest = key.rpartition(".")
        having = [] if dot else [n for n in names if key in hyper_names(n)]
        # A method of the user's own, given as an object, is in no registry.
        named = [part] if part in names else [n for n in names if dot and part == methods.get(n).name]
        if dot and named:
            if rest not in hyper_names(named[0]):
                raise unknown(f"hyper-parameter of {part}", rest, hyper_names(named[0]))
            self.hyper.setdefault(named[0], {})[rest] = value
        elif key in ("method", "seed"):
            raise BadInputError(f"--set {key}=...: use --{key}, or --{key}s in a comparison")
        elif dot and part in OPTION_TABLES:
            one_table = isinstance(self.values.get(part), dict)  # a name with its options
            self.values.setdefault(part if one_table else OPTION_TABLES[part], {})[rest] = value
        elif having:
            for name in having:
                self.hyper.setdefault(name, {})[key] = value
        elif key in PLAIN_KEYS:
            self.values[key] = value
        else:
            known = {k for n in names for k in hyper_names(n)} | {*PLAIN_KEYS} | {f"{p}.*" for p in OPTION_TABLES}
            raise unknown("key", key, known)

    def absorb(self, table: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take in the contents of a TOML file; ``[hyper]`` may hold ``[hyper.METHOD]`` tables."""
        for key, value in table.items():
            if key == "hyper":
                if not isinstance(value, dict):
                    raise BadInputError(f"hyper = {value!r} must be a table of names and values")
                for name, inner in value.items():
                    self._absorb_hyper(name, inner, names)
            else:
                self.values[key] = dict(value) if isinstance(value, dict) else value

    def config(self, method: str, **more: Any) -> Config:
        """Return the configuration of one method; ``more`` are values of this run alone, such as its seed."""
        return Config.read({**self.values, "method": method, "hyper": self.hyper.get(method, {}), **more})

    def copy(self) -> Overrides:
        """Return a copy whose tables can be changed."""
        values = {k: dict(v) if isinstance(v, dict) else v for k, v in self.values.items()}
        return Overrides(values, {name: dict(table) for name, table in self.hyper.items()})

    def _absorb_hyper(self, key: str, value: Any, names: Sequence[str]) -> None:
        if isinstance(value, dict):
            methods.get(key)  # the table of a method that does not run is ignored, of one that does not exist refused
            for inner, v in value.items() if key in names else ():
                self.set(f"{key}.{inner}", v, names)
        elif any(key in hyper_names(n) for n in names):
            self.set(key, value, names)
        else:
            raise unknown("hyper-parameter", key, {k for n in names for k in hyper_names(n)})


def hyper_names(method: str) -> list[str]:
    """Return the names of a method's hyper-parameters."""
    return [f.name for f in dataclasses.fields(methods.get(method))]
