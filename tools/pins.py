"""The versions in ``constraints.txt``, which the tools here look after."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
#: Its wheel differs between indexes (with CUDA, for the CPU only), so no list of hashes fits everywhere.
UNHASHED = "torch"


def pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Return pinned versions by name, normalised and sorted; comments, blank lines and hashes are passed over."""
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Requirement(line.partition("--hash")[0].rstrip("\\ ")) for line in lines if line and line[0] != "-"]
    return dict(sorted((canonicalize_name(each.name), _version(each)) for each in found))


def _version(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    if only.operator != "==":
        raise SystemExit(f"{requirement} is not pinned: write NAME==VERSION")
    return only.version
