"""The machine and the versions with which something was measured."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from feddpc.runs.environment import environment


def describe(device: str) -> dict[str, Any]:
    """Return versions, date, commit, device, threads and load."""
    facts = environment("", device)
    wanted = ("feddpc", "python", "torch", "numpy", "platform", "processor", "cores", "threads", "device")
    return {
        **{k: facts[k] for k in wanted},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).parents[1]),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "command": [_without_folder(word) for word in sys.argv],
    }


def _without_folder(word: str) -> str:
    """Return a word of a command; absolute paths are reduced to the name, because the rest is private.

    >>> [_without_folder(word) for word in ("/home/me/figures.json", "--out=/home/me/figures.json", "results/a.json")]
    ['figures.json', '--out=figures.json', 'results/a.json']
    """
    flag, sign, value = word.rpartition("=")
    return flag + sign + (Path(value).name if Path(value).is_absolute() else value)


def commit(folder: Path) -> str | None:
    """Return the commit of the checkout that ``folder`` is part of, with ``+`` where files differ; None without one."""
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # an installed copy inside somebody else's checkout
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
