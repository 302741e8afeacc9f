"""Replaces certificates and keys while a federation keeps running: old and new are valid together for a while.

* The server's certificate: nodes trust the authority, not the certificate, so a new one needs a restart of the
  SuperLink and nothing at the nodes.
* The authority: first every node gets a ``ca.crt`` with the new and the old authority, then the server gets a
  certificate of the new one, then the old one is taken out.
* A node's key: the new one is registered beside the old one, which is revoked after the node has restarted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from feddpc.errors import BadInputError
from feddpc.federate import certificates
from feddpc.federate.keys import (
    Keys,
    check,
    names_of,
    new_node_key,
    read_certificate,
    read_certificates,
    read_key,
    signer_of,
    write_file,
    write_pair,
)
from feddpc.storage import explain_os_errors, replace_file

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def rotate_server(keys: Keys, hosts: Sequence[str] = (), days: float = 365.0) -> None:
    """Make a new certificate for the server, signed by the present authority; the old pair stays as ``.old``.

    ``hosts`` are by default those of the old certificate.
    """
    old = read_certificate(keys.server)
    names = list(hosts) or names_of(old)
    key, signer = certificates.new_key(), (read_certificate(keys.ca), read_key(keys.ca_key))
    certificate = certificates.server(key, names, dt.timedelta(days=days), *signer)
    with explain_os_errors(keys.folder):
        _keep(keys.server)
        _keep(keys.server_key)
        write_pair(keys.server, keys.server_key, certificate, key)
    for name in names:
        check(keys, name)


def begin_authority(keys: Keys) -> None:
    """Make a new authority: ``ca.crt`` has the new and the old one until :func:`finish_authority`."""
    old = read_certificates(keys.ca)
    if len(old) > 1:
        raise BadInputError(
            f"{keys.ca} has {len(old)} authorities: a rotation is under way. Give this file to every node, run "
            f"`feddpc federate keys rotate-server {keys.folder}`, and then rotate-authority with --finish"
        )
    key = certificates.new_key()
    with explain_os_errors(keys.folder):
        _keep(keys.ca_key)
        # First the nodes' file: with the new key alone, nothing could be signed that they trust.
        replace_file(keys.ca, lambda path: path.write_bytes(_pem(certificates.authority(key), *old)))
        write_file(keys.ca_key, certificates.key_text(key), 0o600)


def finish_authority(keys: Keys) -> None:
    """Take the old authority out of ``ca.crt``; the server must have a certificate of the new one."""
    new, *old = read_certificates(keys.ca)
    if not old:
        raise BadInputError(f"{keys.ca} has one authority only: no rotation is under way")
    if signer_of(keys) != new:
        raise BadInputError(
            f"{keys.server} is still signed by the old authority: run `feddpc federate keys rotate-server "
            f"{keys.folder}` and restart the SuperLink first, or nodes would refuse it"
        )
    with explain_os_errors(keys.folder):
        replace_file(keys.ca, lambda path: path.write_bytes(_pem(new)))
        _old(keys.ca_key).unlink(missing_ok=True)


def rotate_node(keys: Keys, number: int) -> Path:
    """Make a new key for a node, and return it; the old pair becomes ``node-I.old``."""
    path = keys.node(number)
    if not path.with_name(f"{path.name}.pub").exists():
        raise BadInputError(f"{path}.pub does not exist: there is no key of node {number} to replace")
    if _old(path).with_name(f"{path.name}.old.pub").exists():
        raise BadInputError(
            f"{_old(path)}.pub exists: an earlier rotation is under way. Revoke that key first: `feddpc federate keys "
            f"revoke {keys.folder} {path.name}.old --superlink NAME`"
        )
    with explain_os_errors(keys.folder):
        path.with_name(f"{path.name}.pub").rename(path.with_name(f"{path.name}.old.pub"))
        if path.exists():  # it may be at the node only
            path.rename(_old(path))
        new_node_key(path)
    return path


def _pem(*found: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in found)


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _keep(path: Path) -> None:
    """Keep a copy of a file, with its permissions, so that one can go back."""
    write_file(_old(path), path.read_bytes(), path.stat().st_mode & 0o777)
