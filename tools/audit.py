"""Look up the pinned versions in a database of known vulnerabilities that lies on this machine: `make audit`.

The database is a folder, or a zip, of advisories in the OSV format, as JSON or YAML, in any arrangement: what
https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip holds, or a clone of github.com/pypa/advisory-database.
It is looked for at ``--database``, ``$FEDDPC_ADVISORIES``, ``advisories`` in the repository, and in the user's cache.
Nothing is sent or fetched. Without a database it says that it was skipped and exits with 0; with a finding, with 1.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pins import ROOT, pins

#: After so many days a database is called old.
OLD = 30
WHERE_FROM = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"


@dataclass(frozen=True)
class Finding:
    """A pinned version that an advisory names."""

    package: str
    version: str
    advisory: str
    summary: str
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        remedy = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no fixed version is known"
        return f"{self.package} {self.version}: {self.advisory}: {self.summary or 'no summary'} ({remedy})"


def places() -> list[Path]:
    """Return where a database may be, the first choice first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feddpc" / "advisories"
    told = [Path(os.environ["FEDDPC_ADVISORIES"])] if os.environ.get("FEDDPC_ADVISORIES") else []
    return [*told, ROOT / "advisories", cache, cache.with_suffix(".zip")]


def advisories(database: Path) -> Iterator[dict[str, Any]]:
    """Yield every advisory of a folder or zip."""
    if database.is_dir():
        files = ((path.name, path.read_bytes()) for path in sorted(database.rglob("*")) if path.is_file())
    else:
        archive = zipfile.ZipFile(database)
        files = ((name, archive.read(name)) for name in sorted(archive.namelist()))
    for name, content in files:
        if name.endswith((".json", ".yaml", ".yml")):
            yield _read(name, content)


def _read(name: str, content: bytes) -> dict[str, Any]:
    import yaml

    try:
        found = json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
    except (ValueError, yaml.YAMLError) as error:
        sys.exit(f"{name} cannot be read: {error}")
    if not isinstance(found, dict):
        sys.exit(f"{name} is no advisory in the OSV format")
    return found


def affects(advisory: dict[str, Any], name: str, version: str) -> bool:
    """Say whether an advisory, unless it was withdrawn, names this version of a package."""
    return not advisory.get("withdrawn") and any(
        version in entry.get("versions", []) or any(_within(r, Version(version)) for r in entry.get("ranges", []))
        for entry in _entries(advisory, name)
    )


def _entries(advisory: dict[str, Any], name: str) -> list[dict[str, Any]]:
    packages = [(entry, entry.get("package", {})) for entry in advisory.get("affected", [])]
    return [e for e, p in packages if p.get("ecosystem") == "PyPI" and canonicalize_name(p.get("name", "")) == name]


def _within(affected: dict[str, Any], version: Version) -> bool:
    """Follow a range's events in the order of versions, as OSV defines it; commits of git are passed over."""
    if affected.get("type") == "GIT":
        return False
    events = [(_parsed(text, kind), kind) for event in affected.get("events", []) for kind, text in event.items()]
    inside = False
    for at, kind in sorted(events, key=lambda event: event[0]):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _parsed(text: str, kind: str) -> Version:
    """Return an event's version; one that nobody can read must not hide a vulnerability."""
    try:
        return Version("0.dev0") if text == "0" else Version(text)
    except InvalidVersion:
        return Version("0.dev0") if kind == "introduced" else Version("999999!0")


def audit(database: Path, versions: dict[str, str]) -> tuple[list[Finding], str]:
    """Return what was found, and how large and how old the database is; an empty text if there is nothing in it."""
    found, count, newest = [], 0, ""
    for advisory in advisories(database):
        count, newest = count + 1, max(newest, str(advisory.get("modified", "")))
        named = {canonicalize_name(e.get("package", {}).get("name", "")) for e in advisory.get("affected", [])}
        for name in sorted(named & versions.keys()):
            if affects(advisory, name, versions[name]):
                ids = ", ".join([str(advisory["id"]), *advisory.get("aliases", [])])
                found.append(
                    Finding(name, versions[name], ids, str(advisory.get("summary", "")), _fixed(advisory, name))
                )
    return found, f"{count} advisories, {_age(newest)}" if count else ""


def _fixed(advisory: dict[str, Any], name: str) -> tuple[str, ...]:
    events = [e for entry in _entries(advisory, name) for r in entry.get("ranges", []) for e in r.get("events", [])]
    return tuple(str(event["fixed"]) for event in events if "fixed" in event)


def _age(newest: str) -> str:
    if not newest:
        return "of unknown age"
    days = (dt.datetime.now(dt.UTC).date() - dt.date.fromisoformat(newest[:10])).days
    return f"the newest of {newest[:10]}, {days} days ago" + (": the database is old" if days > OLD else "")


def main() -> None:
    """Audit, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", type=Path, help="a folder or zip of advisories in the OSV format")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="an advisory that does not apply")
    asked = parser.parse_args()
    if asked.database is not None and not asked.database.exists():
        sys.exit(f"there is no database {asked.database}")
    database = asked.database or next((place for place in places() if place.exists()), None)
    if database is None:
        looked = ", ".join(map(str, places()))
        print(f"audit skipped: no database of advisories at {looked}; unpack {WHERE_FROM} at one of them")
        return
    versions = pins()
    found, about = audit(database, versions)
    if not about:
        told = f"audit skipped: {database} holds no advisories (a zip must be unpacked there)"
        sys.exit(told) if asked.database is not None else print(told)
        return
    found = [finding for finding in found if not set(finding.advisory.split(", ")) & set(asked.ignore)]
    for finding in found:
        print(finding)
    print(f"audit: {len(found)} findings in {len(versions)} pinned versions ({database}: {about})")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
