"""What can go wrong through no fault of the program: errors that name the thing, its value and the remedy."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from pathlib import Path

#: What other libraries call things, and their names here.
SYNONYMS = {
    "learning_rate": "lr",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "local_epochs": "epochs",
    "dataset": "data",
    "momentum": "client_optimizer",
    "weight_decay": "client_optimizer",
}


class FeddpcError(Exception):
    """Base of every error a user can cause; the command line prints it without a traceback and exits with 2."""


class BadInputError(FeddpcError):
    """A name, value or combination that cannot be used."""


class DataError(FeddpcError):
    """A data file that is missing, damaged, of the wrong kind, or not what its checksum says."""


class RunFolderError(FeddpcError):
    """A run folder that is missing, foreign, damaged, in use, or belongs to another configuration."""


class FolderInUseError(RunFolderError):
    """A run folder that another process holds."""


def unknown(kind: str, value: str, choices: Iterable[str], more: str = "") -> BadInputError:
    """Build the error for an unknown name, with the nearest valid names first and ``more`` at its end.

    >>> str(unknown("method", "fedpdc", ["fedavg", "feddpc", "fedprox"]))
    "unknown method 'fedpdc': did you mean 'feddpc' or 'fedprox'? Valid: fedavg, feddpc, fedprox"
    """
    names = sorted(choices)
    near = difflib.get_close_matches(value.lower(), names, n=2, cutoff=0.6)
    if SYNONYMS.get(value.lower()) in names:
        near = [SYNONYMS[value.lower()]]
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return BadInputError(f"unknown {kind} {value!r}: {hint}Valid: {', '.join(names)}{more}")


def wrong_type(name: str, value: object, wanted: str) -> BadInputError:
    """Return the error for an argument of a type that it cannot have."""
    return BadInputError(f"{name} is of type {type(value).__name__}: give {wanted}")


def unusable(path: Path, number: int | None, reason: object) -> RunFolderError:
    """Build the error for a file or folder that the operating system refused, with its error ``number`` if known.

    >>> str(unusable(Path("runs/a"), errno.EACCES, "Permission denied"))
    'runs/a cannot be used: Permission denied; make it writable, or choose another --out'
    """
    if number in (errno.ENOSPC, errno.EDQUOT):
        kept = "what was recorded so far is kept"
        return RunFolderError(f"the disk of {path} is full; {kept}: free some space and use --resume")
    remedy = "; make it writable, or choose another --out" if number in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
    return RunFolderError(f"{path} cannot be used: {reason}{remedy}")
