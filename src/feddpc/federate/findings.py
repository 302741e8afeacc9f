"""What ``feddpc federate check`` finds: one line each, with the value and the remedy."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc._version import __version__
from feddpc.errors import BadInputError
from feddpc.federate import keys
from feddpc.flower import versions
from feddpc.storage import explain_os_errors

if TYPE_CHECKING:
    from cryptography import x509

#: A certificate is reported this long before it expires.
AHEAD = dt.timedelta(days=30)


class Level(IntEnum):
    """How bad a finding is; the worst is the exit code, as monitoring systems expect it."""

    ok = 0
    warning = 1
    error = 2


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    level: Level
    what: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.level.name:<8}{self.what}: {self.value}{remedy}"


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level."""
    return max((finding.level for finding in findings), default=Level.ok)


def this_machine() -> dict[str, Any]:
    """Return the versions on this machine, as the other end compares them."""
    return {
        "feddpc": __version__,
        "protocols": [versions.OLDEST, versions.NEWEST],
        "flwr": metadata.version("flwr"),
        "python": platform.python_version(),
    }


def report(findings: Iterable[Finding]) -> str:
    """Return findings and versions as JSON, for monitoring and for ``--peer`` on another machine."""
    listed = [asdict(finding) | {"level": finding.level.name} for finding in findings]
    return json.dumps(this_machine() | {"findings": listed}, indent=2)


def expiry(what: str, certificate: x509.Certificate, remedy: str) -> Finding:
    """Return whether a certificate is valid, and for how long."""
    end = certificate.not_valid_after_utc
    if why := keys.out_of_date(certificate):
        return Finding(Level.error, what, why, remedy)
    left = end - dt.datetime.now(dt.UTC)
    value = f"valid until {end:%Y-%m-%d}, {left.days} days"
    return Finding(Level.warning, what, value, remedy) if left < AHEAD else Finding(Level.ok, what, value)


def check_versions(peer: Path | None) -> list[Finding]:
    """Return the versions here, and whether the other end, whose report is in a file, fits them."""
    here = this_machine()
    lines = [
        Finding(Level.ok, "feddpc", f"{here['feddpc']}, protocols {versions.OLDEST} to {versions.NEWEST}"),
        Finding(Level.ok, "flwr", f"{here['flwr']}, Python {here['python']}"),
    ]
    if peer is None:
        return lines
    other = _read_peer(peer)
    stated = "{} protocol {}-{}".format(other["feddpc"], *other["protocols"])
    try:
        common = versions.agreed(stated, "the other end", "this machine")
        lines.append(Finding(Level.ok, "protocol", f"{common}, with feddpc {other['feddpc']} at the other end"))
    except versions.ProtocolError as error:
        what, _, remedy = str(error).rpartition(": ")
        lines.append(Finding(Level.error, "protocol", what, remedy))
    return [*lines, compare_flwr(str(other["flwr"]), "the other end")]


def compare_flwr(theirs: str, them: str) -> Finding:
    """Return whether Flower at the other end has the same minor version; Flower itself only warns."""
    ours = metadata.version("flwr")
    if _minor(theirs) == _minor(ours):
        return Finding(Level.ok, f"flwr at {them}", theirs)
    remedy = "both work together as far as tested, but install the same one soon"
    return Finding(Level.warning, f"flwr at {them}", f"{theirs}, here {ours}", remedy)


def check_folder(folder: Path) -> list[Finding]:
    """Return whether the certificates in a server's folder of keys are valid, and fit each other."""
    own = keys.Keys(folder)
    remedy = f"`feddpc federate keys rotate-server {folder}` and restart the SuperLink"
    found = [expiry("server.crt", keys.read_certificate(own.server), remedy)]
    authorities = keys.read_certificates(own.ca)
    for number, authority in enumerate(authorities):
        name = "ca.crt" if len(authorities) == 1 else f"ca.crt, {'old' if number else 'new'} authority"
        remedy = f"`feddpc federate keys rotate-authority {folder}`, in time to visit every node"
        found.append(expiry(name, authority, remedy))
    try:
        for host in keys.names_of(keys.read_certificate(own.server)) or ["any host"]:
            keys.check(own, host)
        found.append(Finding(Level.ok, "server.key", "belongs to server.crt, which ca.crt has signed"))
    except BadInputError as error:
        if worst(found) < Level.error:  # else it says the same again
            found.append(Finding(Level.error, "certificates", str(error)))
    if len(authorities) > 1:
        where = "the new" if keys.signer_of(own) == authorities[0] else "the old"
        remedy = "finish it when every node has this ca.crt and the server a certificate of the new authority"
        found.append(Finding(Level.warning, "rotation", f"under way, server.crt is of {where} authority", remedy))
    for path in (own.ca_key, own.server_key):
        if path.exists() and path.stat().st_mode & 0o077:
            found.append(Finding(Level.warning, path.name, "other users may read it", f"chmod 600 {path}"))
    return found


def _read_peer(path: Path) -> dict[str, Any]:
    with explain_os_errors(path):
        text = path.read_text("utf-8", errors="replace")
    try:
        found = json.loads(text)
        oldest, newest = (int(number) for number in found["protocols"])
        return {"feddpc": str(found["feddpc"]), "flwr": str(found["flwr"]), "protocols": (oldest, newest)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInputError(
            f"{path} is no report of another machine: write one there with `feddpc federate check --json > FILE`"
        ) from None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
