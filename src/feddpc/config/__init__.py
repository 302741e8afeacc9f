"""The configuration of a run: one flat, frozen record, read from TOML and flags, written back complete.

Every key is a field of :class:`Config` (``fields``) and carries its facts as metadata (``metadata``): help text, group,
choices, whether it changes the numbers. The flags of the command line, ``--set``, the reference page and the lists of
keys that other modules need (``derived``) all come from there. ``toml`` reads and writes files.
"""

from feddpc.config.derived import AFTER_SETUP_KEYS as AFTER_SETUP_KEYS
from feddpc.config.derived import EXECUTION_KEYS as EXECUTION_KEYS
from feddpc.config.derived import MAY_CHANGE as MAY_CHANGE
from feddpc.config.derived import OPTION_TABLES as OPTION_TABLES
from feddpc.config.derived import OPTIONS_BY_CHOICE as OPTIONS_BY_CHOICE
from feddpc.config.derived import PER_RUN_KEYS as PER_RUN_KEYS
from feddpc.config.derived import PLAIN_KEYS as PLAIN_KEYS
from feddpc.config.derived import TUNED_KEYS as TUNED_KEYS
from feddpc.config.derived import choices_of as choices_of
from feddpc.config.derived import code_in as code_in
from feddpc.config.derived import default_of as default_of
from feddpc.config.derived import keys as keys
from feddpc.config.derived import types_of_keys as types_of_keys
from feddpc.config.domains import one_rate as one_rate
from feddpc.config.fields import Config as Config
from feddpc.config.metadata import GROUPS as GROUPS
from feddpc.config.metadata import Key as Key
from feddpc.config.metadata import Options as Options
from feddpc.config.toml import parse_set as parse_set
from feddpc.config.toml import read_toml as read_toml
from feddpc.config.toml import write_toml as write_toml
