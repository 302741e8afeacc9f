"""The facts about keys of a configuration, kept as metadata of its fields, and reading values by them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from feddpc.checks import coerce
from feddpc.errors import BadInputError, unknown
from feddpc.schedules import name_of_schedule

Options = dict[str, Any]
#: Groups of keys, in the order of the help text and of the reference page.
GROUPS = ("method", "data", "federation", "training", "robustness and privacy", "execution")
_types: dict[type[Keyed], dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Key:
    """The facts about one key of the configuration."""

    help: str  #: one or two sentences for the help text and the reference page
    group: str  #: one of GROUPS
    shown: str | None = None  #: the default in words, where the value alone says too little
    kind: str | None = None  #: the registry from which the value is a name
    choices: tuple[str, ...] = ()  #: names of that registry; a test compares the two
    changes_numbers: bool = True  #: False: decides where and how fast a run computes, not what
    may_change: bool = False  #: a resumed run may have another value
    after_setup: bool = False  #: used only after data, partition and model are built, which runs can therefore share
    tuned: bool = False  #: belongs to what is tuned, as hyper-parameters do; other keys belong to the problem
    per_run: bool = False  #: differs between the runs of one study, which has ``methods`` and ``seeds``
    simulator_only: bool = False  #: a federation over Flower has no such thing, and refuses other values than usual
    at_nodes: bool = (
        False  #: in a federation over Flower, nodes decide it with their data and apps: no strategy reads it
    )
    options_of: str | None = None  #: a table with the options of this key; ``--set`` reaches it by this name


def about(help: str, group: str, **facts: Any) -> dict[str, Key]:
    """Return the metadata of a field."""
    return {"key": Key(help=help, group=group, **facts)}


def key(default: Any, help: str, group: str, **facts: Any) -> Any:
    """Return a dataclass field with its facts."""
    return field(default=default, metadata=about(help, group, **facts))


def facts_of(kind: type[Keyed]) -> dict[str, Key]:
    """Return the facts about every key of a configuration class, in the order of the fields."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(kind) if "key" in f.metadata}


def types_of(kind: type[Keyed]) -> dict[str, Any]:
    """Return the types of all keys; looking them up takes longer than reading a configuration."""
    if kind not in _types:
        _types[kind] = typing.get_type_hints(kind)
    return _types[kind]


def options_by_choice(kind: type[Keyed]) -> dict[str, str]:
    """Return which table goes with which choice: another model needs other options."""
    facts = facts_of(kind)
    return {about.options_of: name for name, about in facts.items() if about.options_of not in (None, name)}


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A configuration whose fields carry the facts about its keys: how it is read, and how two of them differ."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from names and values, checking both.

        Where a choice has options, one table can give both: ``{"client_optimizer": {"name": "sgd", "momentum": 0.9}}``.
        """
        hints, values = types_of(cls), _split_choices(cls, values)
        if isinstance(values.get("metrics"), list | tuple):
            values = {**values, "metrics": ",".join(map(str, values["metrics"]))}
        for key in values:
            if key not in hints:
                raise unknown("key", key, hints)
        return cls(**{k: _fit(k, v, hints[k]) for k, v in values.items()})

    def __repr__(self) -> str:
        """Show the values that differ from the defaults."""
        usual = type(self)()
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = [f"{name}={value!r}" for name, value in given.items() if value != getattr(usual, name)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def asdict(self) -> dict[str, Any]:
        """Return names and values; what is unset is left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """Say where ``given`` asks for something else than this configuration; ``auto`` asks for nothing."""
        own, given = _plain(self.asdict()), _plain(_split_choices(type(self), given))
        differing = []
        for key, value in given.items():
            if isinstance(value, dict):
                differing += [
                    f"{key}.{k} = {v!r}, was {own[key].get(k)!r}" for k, v in value.items() if own[key].get(k) != v
                ]
            elif value != "auto" and own.get(key) != value:
                differing.append(f"{key} = {value!r}, was {own.get(key)!r}")
        return differing


def _plain(value: Any) -> Any:
    """Return ``value`` as TOML would give it back: lists for tuples."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _split_choices(kind: type[Keyed], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with name and options apart where a table gives both; a function of the rounds by its name."""
    split = dict(values)
    for key, table in options_by_choice(kind).items():
        value = values.get(key)
        if key == "lr_schedule" and callable(value):
            split[key] = name_of_schedule(value)
        elif isinstance(value, Mapping) and key in ("lr_schedule", "client_optimizer", "server_optimizer"):
            if "name" not in value:
                raise BadInputError(
                    f"{key} = {dict(value)} has no name: write name = one of {facts_of(kind)[key].choices}"
                )
            if values.get(table):
                raise BadInputError(
                    f"{key} = {dict(value)} is a table and {table} = {values[table]} too: give all options in one"
                )
            split |= {key: value["name"], table: {name: option for name, option in value.items() if name != "name"}}
    return split


def _fit(key: str, value: Any, hint: Any) -> Any:
    if hint == Options:
        if not isinstance(value, dict):
            raise BadInputError(f"{key} = {value!r} must be a table of names and values")
        return dict(value)
    return coerce(key, value, hint)
