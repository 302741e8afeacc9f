"""Flower's programs: where they are, and the environment in which they neither report, look up nor install anything."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from feddpc.errors import BadInputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",  # a machine that plays several has no cores to spare
}


def program(name: str) -> str:
    """Return the full path of one of Flower's programs, which lie beside this Python's."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise BadInputError(f"the program {name} is not installed: pip install 'feddpc[flower]'")
    return str(Path(found).resolve())


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a program; ``home`` is Flower's folder, its own since apps are unpacked there."""
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])  # Flower starts its parts by name
    own = {"PATH": path, "FLWR_HOME": str(home)}
    if found := os.environ.get("PYTHONPATH"):
        own["PYTHONPATH"] = os.pathsep.join(str(Path(part).resolve()) for part in found.split(os.pathsep))
    return {**os.environ, **QUIET, **own}
