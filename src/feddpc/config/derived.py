"""What the facts about the keys say, as the lists that other modules need.

>>> EXECUTION_KEYS
('device', 'engine', 'inner_engine', 'rank_timeout', 'compile', 'data_memory', 'client_memory', 'threads')
>>> MAY_CHANGE, PER_RUN_KEYS
(('rounds', 'rank_timeout', 'data_memory', 'client_memory'), ('method', 'seed', 'hyper'))
>>> "lr" in AFTER_SETUP_KEYS, "clients" in AFTER_SETUP_KEYS, "lr" in TUNED_KEYS
(True, False, True)
>>> OPTION_TABLES["model"], OPTION_TABLES["privacy"], OPTIONS_BY_CHOICE["method"], "privacy" in OPTIONS_BY_CHOICE
('model_options', 'privacy', 'hyper', False)
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any, Literal

from feddpc.config.fields import Config
from feddpc.config.metadata import Key, facts_of, options_by_choice, types_of
from feddpc.registry import code_names


@functools.cache
def keys() -> dict[str, Key]:
    """Return the facts about every key, in the order of the fields."""
    return facts_of(Config)


def types_of_keys() -> dict[str, Any]:
    """Return the types of all keys."""
    return types_of(Config)


#: Keys that decide where and how fast a run computes, but not what.
EXECUTION_KEYS = tuple(name for name, facts in keys().items() if not facts.changes_numbers)
#: Keys that differ between the runs of one study.
PER_RUN_KEYS = tuple(name for name, facts in keys().items() if facts.per_run)
#: Keys that may differ between runs that share data, partition and model.
AFTER_SETUP_KEYS = tuple(name for name, facts in keys().items() if facts.after_setup)
#: Keys that are tuned by default, besides the hyper-parameters.
TUNED_KEYS = tuple(name for name, facts in keys().items() if facts.tuned)
#: Keys whose values may change when a run is resumed.
MAY_CHANGE = tuple(name for name, facts in keys().items() if facts.may_change)
#: Keys whose value is no table: those that ``--set KEY=VALUE`` and flags set directly.
PLAIN_KEYS = tuple(name for name, facts in keys().items() if not facts.options_of)
#: Which table goes with which choice: another model needs other options.
OPTIONS_BY_CHOICE = options_by_choice(Config)
#: Tables of options by the name that ``--set NAME.KEY=VALUE`` uses; hyper-parameters are not among them.
OPTION_TABLES = {facts.options_of: name for name, facts in keys().items() if facts.options_of and name != "hyper"}


def code_in(values: Mapping[str, Any]) -> list[str]:
    """Return which values of a configuration are code in a file.

    >>> code_in({"model": "mine.py:Net", "data": "digits", "rounds": 3})
    ['mine.py:Net']
    """
    return code_names([values[name] for name, facts in keys().items() if facts.kind and name in values])


def choices_of(name: str) -> tuple[str, ...]:
    """Return the values that the help text lists for a key, the empty tuple where it takes any.

    >>> choices_of("weighting"), choices_of("lr")
    (('uniform', 'samples'), ())
    """
    hint = types_of_keys()[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else keys()[name].choices


def default_of(name: str) -> str:
    """Return a key's default in words.

    >>> default_of("rounds"), default_of("dropout"), default_of("server_lr"), default_of("privacy")
    ('100', '0', 'that of the clients', 'none')
    """
    facts, value = keys()[name], getattr(Config(), name)
    if facts.shown is not None:
        return facts.shown
    if value is None or value == {}:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
