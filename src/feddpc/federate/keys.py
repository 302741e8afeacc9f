"""The files with a federation's keys and certificates: created if missing, and checked before use."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.errors import BadInputError
from feddpc.federate import certificates
from feddpc.storage import explain_os_errors

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_BEGIN = b"-----BEGIN CERTIFICATE-----"
#: Names under which processes of this machine reach it.
LOOPBACK = ("localhost", "127.0.0.1")


class Keys:
    """The files of a folder with keys and certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"  #: The authority's certificate: every machine has it, to verify the server.
        self.ca_key = folder / "ca.key"  #: The authority's key: anyone who has it can impersonate the server.
        self.server = folder / "server.crt"  #: The server's certificate.
        self.server_key = folder / "server.key"  #: The server's key.

    def node(self, number: int) -> Path:
        """The private key of a node; the file of the public key, for the server, ends in ``.pub``."""
        return self.folder / f"node-{number}"


def make(folder: Path, hosts: Sequence[str], nodes: int, days: float = 365.0) -> Keys:
    """Create the files that are missing in ``folder``; existing files stay, so that nodes can be added later.

    Args:
        folder: where the files go; private keys are readable by their owner only.
        hosts: names and addresses under which nodes reach the server.
        nodes: how many node keys there should be.
        days: how long the server's certificate is valid.
    """
    keys = Keys(folder)
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n")
        if not keys.ca.exists():
            key = certificates.new_key()
            write_pair(keys.ca, keys.ca_key, certificates.authority(key), key)
        if not keys.server.exists():
            key, signer = certificates.new_key(), (read_certificate(keys.ca), read_key(keys.ca_key))
            certificate = certificates.server(key, hosts, dt.timedelta(days=days), *signer)
            write_pair(keys.server, keys.server_key, certificate, key)
        for number in range(nodes):
            if not keys.node(number).exists():
                new_node_key(keys.node(number))
    for host in hosts:
        check(keys, host)
    return keys


def check(keys: Keys, host: str) -> None:
    """Raise if nodes that reach the server as ``host`` would refuse its certificate; the error names the file."""
    server = read_certificate(keys.server)
    if why := out_of_date(server):
        raise BadInputError(
            f"the certificate {keys.server} {why}: make a new one with `feddpc federate keys rotate-server "
            f"{keys.folder}`"
        )
    authority = signer_of(keys)
    if authority is None:
        raise BadInputError(
            f"the certificate {keys.server} was not signed by {keys.ca}: nodes would refuse the server; use two files "
            "that were made together"
        )
    if why := out_of_date(authority):
        raise BadInputError(
            f"the certificate {keys.ca} {why}: make new keys in another folder with `feddpc federate keys make`, and "
            "give every node its new ca.crt"
        )
    if host not in names_of(server):
        raise BadInputError(
            f"the certificate {keys.server} is for {', '.join(names_of(server))}, not for {host}: make a new one with "
            f"`feddpc federate keys rotate-server {keys.folder} --host {host}`"
        )
    if _public(read_key(keys.server_key)) != _public(server):
        raise BadInputError(f"the key {keys.server_key} does not belong to the certificate {keys.server}")


def signer_of(keys: Keys) -> x509.Certificate | None:
    """Return the authority in ``ca.crt`` that signed the server's certificate; during a rotation there are two."""
    from cryptography.exceptions import InvalidSignature

    server = read_certificate(keys.server)
    for authority in read_certificates(keys.ca):
        with suppress(ValueError, TypeError, InvalidSignature):
            server.verify_directly_issued_by(authority)
            return authority
    return None


def out_of_date(certificate: x509.Certificate) -> str | None:
    """Return what is wrong with the dates of a certificate, or None."""
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        begin = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return f"is not valid before {begin} (or this machine's clock is wrong)"
    return None


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a certificate is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate, the first of a file."""
    return read_certificates(path)[0]


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read all certificates of a file."""
    with explain_os_errors(path):
        text = path.read_bytes()
    parts = text.split(_BEGIN)[1:] or [text]
    return [certificate_of(_BEGIN + part, str(path)) for part in parts]


def certificate_of(text: bytes, where: str) -> x509.Certificate:
    """Return the certificate in ``text``; error messages name its source ``where``."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(text)
        names_of(certificate), out_of_date(certificate), certificate.public_key()  # parts are decoded on access
    except Exception:  # each part has its own errors
        raise BadInputError(f"{where} is no certificate in PEM form") from None
    return certificate


def read_key(path: Path) -> Any:
    """Read a private key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with explain_os_errors(path):
        text = path.read_bytes()
    try:
        return load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadInputError(f"{path} is no private key in PEM form without a password") from None


def new_node_key(path: Path) -> None:
    """Create a key pair of a node in the format that Flower's SuperNodes read: OpenSSH, on the curve P-384."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = certificates.new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_file(path.with_name(f"{path.name}.pub"), public + b"\n", 0o644)
    write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)


def _public(holder: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    encoded: bytes = holder.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def write_pair(path: Path, key_path: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    """Write a certificate and its key."""
    from cryptography.hazmat.primitives.serialization import Encoding

    write_file(key_path, certificates.key_text(key), 0o600)
    write_file(path, certificate.public_bytes(Encoding.PEM), 0o644)


def write_file(path: Path, text: bytes, mode: int) -> None:
    """Write a new file that never has other permissions than ``mode``."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text)
