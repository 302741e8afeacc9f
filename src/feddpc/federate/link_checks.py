"""Checks of a SuperLink from a node's machine: connection, certificate, clock, release, and the node's own key.

All go to the port and the paths that nodes use, so they also pass a proxy that lets nothing else through.
"""

from __future__ import annotations

import base64
import datetime as dt
import http.client
import json
import re
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from feddpc.errors import BadInputError
from feddpc.federate import connections, keys
from feddpc.federate.findings import Finding, Level, compare_flwr, expiry
from feddpc.federate.flower_cli import FlowerCli
from feddpc.federate.node_keys import NodeKeys
from feddpc.storage import explain_os_errors

#: Seconds by which a node's clock may be ahead of the server's, and behind it: Flower refuses more.
AHEAD, BEHIND = 5.0, 305.0
#: From this difference on a clock is reported.
SUSPICIOUS = 2.0
#: How Flower answers a node that activates itself with a heartbeat that it does not allow.
_KNOWN_KEY, _UNKNOWN_KEY = 2003, 2004
_NTP = "synchronize both clocks by NTP (chrony or systemd-timesyncd)"


def check_link(address: str, ca: Path, key: Path | None, timeout: float = 10.0) -> list[Finding]:
    """Return what a node on this machine would meet at ``address``."""
    try:
        shown = connections.check_server(address, ca, timeout)
    except BadInputError as error:
        return [Finding(Level.error, "connection", str(error))]
    found = [Finding(Level.ok, "connection", shown)]
    server = keys.certificate_of(
        ssl.get_server_certificate(connections.split(address), timeout=timeout).encode(), address
    )
    found.append(expiry("server's certificate", server, "make a new one there: `feddpc federate keys rotate-server`"))
    for authority in keys.read_certificates(ca):
        found.append(expiry(str(ca), authority, "get the new ca.crt from the server"))
    try:
        with _Connection(address, ca, timeout) as link:
            began = time.time()
            link.request("GET", "/openapi.json")
            response = link.getresponse()
            taken = time.time() - began
            found += [_clock(response.getheader("date"), began, taken), _release(response)]
        if key is not None:
            with _Connection(address, ca, timeout) as link:
                found.append(_key(link, key))
    except (OSError, http.client.HTTPException) as error:
        found.append(
            Finding(Level.error, "SuperLink", f"{address} does not answer in HTTP ({error})", "look at its log")
        )
    return found


def check_nodes(folder: Path, link: FlowerCli | None) -> list[Finding]:
    """Return which node keys of a server's folder are registered or revoked; ``link`` asks the SuperLink too."""
    nodes = NodeKeys(folder)
    states = link.nodes() if link is not None else {}
    found = []
    for name, path in nodes.public_keys().items():
        entry = nodes.entry(path)
        if entry is None:
            remedy = f"`feddpc federate keys register {folder} --superlink NAME --key {name}`"
            found.append(Finding(Level.warning, name, "not registered from this folder", remedy))
            continue
        value = f"node {entry.node_id}, registered {entry.registered}"
        state = states.get(entry.node_id) if link is not None else None
        if state == "unregistered":
            remedy = f"its key cannot come back: `feddpc federate keys revoke {folder} {name} --superlink NAME`"
            found.append(Finding(Level.error, name, f"node {entry.node_id}, removed from the SuperLink", remedy))
        elif link is not None and state is None:
            command = f"`feddpc federate keys register {folder} --superlink NAME`"
            remedy = f"the SuperLink was started without its --database: restore that, or register the keys: {command}"
            found.append(Finding(Level.error, name, f"node {entry.node_id}, unknown to the SuperLink", remedy))
        else:
            found.append(Finding(Level.ok, name, f"{value}, {state}" if state else value))
        if name.endswith(".old"):
            remedy = f"`feddpc federate keys revoke {folder} {name} --superlink NAME` once the node has its new key"
            found.append(Finding(Level.warning, name, "still valid", remedy))
    revoked = [entry for entry in nodes.entries.values() if entry.revoked]
    found += [Finding(Level.ok, entry.name, f"node {entry.node_id}, revoked {entry.revoked}") for entry in revoked]
    return found


class _Connection:
    """An HTTPS connection that verifies the server, to be used in a ``with`` block."""

    def __init__(self, address: str, ca: Path, timeout: float) -> None:
        host, port = connections.split(address)
        context = ssl.create_default_context(cafile=str(ca))
        self.connection = http.client.HTTPSConnection(host, port, context=context, timeout=timeout)

    def __enter__(self) -> http.client.HTTPSConnection:
        return self.connection

    def __exit__(self, *exc: object) -> None:
        self.connection.close()


def _clock(date: str | None, began: float, taken: float) -> Finding:
    """Compare the clock here with the server's, from the date of its answer, which has no fractions of a second."""
    try:
        theirs = parsedate_to_datetime(date or "").timestamp() + 0.5
    except (ValueError, TypeError):
        return Finding(Level.warning, "clock", "the server's answer has no date", "compare the clocks by hand")
    ahead = began + taken / 2 - theirs
    return clock_finding(ahead, 0.5 + taken / 2)


def clock_finding(ahead: float, uncertainty: float) -> Finding:
    """Return whether Flower accepts a node whose clock is ``ahead`` of the server's by so many seconds."""
    way = "ahead of" if ahead > 0 else "behind"
    value = f"{abs(ahead):.1f} s {way} the server (within {uncertainty:.1f} s)"
    if ahead > AHEAD - uncertainty or ahead < -BEHIND + uncertainty:
        limits = f"Flower refuses nodes whose clock is {AHEAD:.0f} s ahead or {BEHIND:.0f} s behind: {_NTP}"
        return Finding(Level.error, "clock", value, limits)
    if abs(ahead) > SUSPICIOUS + uncertainty:
        return Finding(Level.warning, "clock", value, _NTP)
    return Finding(Level.ok, "clock", value)


def _release(response: http.client.HTTPResponse) -> Finding:
    """Return which Flower the SuperLink is; a proxy in front of it may hide that."""
    body = response.read(1 << 22)
    try:
        version = json.loads(body)["info"]["version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        version = None
    if not isinstance(version, str) or not re.fullmatch(r"[\w.+-]{1,40}", version):
        return Finding(
            Level.ok, "flwr at the SuperLink", "not shown, as behind a proxy that passes on nodes' paths only"
        )
    return compare_flwr(version, "the SuperLink")


def _key(link: http.client.HTTPSConnection, path: Path) -> Finding:
    """Ask the SuperLink whether it would let a node in, without becoming one: the heartbeat asked for is invalid."""
    private, public = _read_private(path)
    stamp = dt.datetime.now(dt.UTC).isoformat()
    signature = _sign(private, stamp.encode())
    encoded = {"flwr-public-key": public, "flwr-signature": signature}
    headers = {name: base64.b64encode(value).decode() for name, value in encoded.items()}
    headers |= {"flwr-timestamp": stamp, "content-type": "application/protobuf"}
    link.request("POST", "/v1/fleet/activate-node", _field(1, public), headers)
    response = link.getresponse()
    body = response.read(1 << 16)
    try:
        code = json.loads(body).get("code")
    except (ValueError, AttributeError, RecursionError):
        code = None
    name = path.name
    if code == _KNOWN_KEY:
        return Finding(Level.ok, name, "registered at the SuperLink")
    if code == _UNKNOWN_KEY:
        command = f"feddpc federate keys register FOLDER --superlink NAME --key {name}"
        remedy = f"run `{command}` on the server; a revoked key never gets in again"
        return Finding(Level.error, name, "not registered at the SuperLink, or revoked", remedy)
    if response.status == 401:
        return Finding(Level.error, name, "the SuperLink refuses its signature, which has the time in it", _NTP)
    return Finding(Level.warning, name, f"the SuperLink answered {response.status}, which says nothing about the key")


def _read_private(path: Path) -> tuple[Any, bytes]:
    """Return a node's private key, and its public key as Flower sends it."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    with explain_os_errors(path):
        text = path.read_bytes()
    try:
        key = load_ssh_private_key(text, None)
    except Exception:  # of many kinds
        raise BadInputError(f"{path} is no private key in OpenSSH's form without a password") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise BadInputError(f"{path} is a key of another kind: Flower takes the curves P-256, P-384 and P-521")
    return key, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _sign(private: Any, text: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    signature: bytes = private.sign(text, ECDSA(SHA256()))
    return signature


def _field(number: int, value: bytes) -> bytes:
    """Return a field of bytes in Protocol Buffers' format.

    >>> _field(1, b"x" * 200)[:3]
    b'\\n\\xc8\\x01'
    """
    length, size = b"", len(value)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value
