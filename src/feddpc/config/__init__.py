"""The configuration of a run: one flat, frozen record, read from TOML and flags, written back complete.

Every key is a field of :class:`Config` (``fields``) and carries its facts as metadata (``keys``): help text, group,
choices, whether it changes the numbers. The flags of the command line, ``--set``, the reference page and the lists of
keys that other modules need (``derived``) all come from there. ``toml`` reads and writes files.
"""

from feddpc.config.derived import (
    AFTER_SETUP_KEYS,
    EXECUTION_KEYS,
    MAY_CHANGE,
    OPTION_TABLES,
    OPTIONS_BY_CHOICE,
    PER_RUN_KEYS,
    PLAIN_KEYS,
    TUNED_KEYS,
    choices_of,
    code_in,
    default_of,
    keys,
    types_of_keys,
)
from feddpc.config.fields import Config
from feddpc.config.keys import GROUPS, Key, Options
from feddpc.config.toml import parse_set, read_toml, write_toml

__all__ = [
    "AFTER_SETUP_KEYS",
    "EXECUTION_KEYS",
    "GROUPS",
    "MAY_CHANGE",
    "OPTIONS_BY_CHOICE",
    "OPTION_TABLES",
    "PER_RUN_KEYS",
    "PLAIN_KEYS",
    "TUNED_KEYS",
    "Config",
    "Key",
    "Options",
    "choices_of",
    "code_in",
    "default_of",
    "keys",
    "parse_set",
    "read_toml",
    "types_of_keys",
    "write_toml",
]
