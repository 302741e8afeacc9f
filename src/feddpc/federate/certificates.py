"""Makes certificates: a certificate authority, and a server certificate that it signs.

The ``cryptography`` package, which Flower installs, is imported on first use.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as Key

#: The authority is valid longer than server certificates: nodes store it, and replacing it means visiting all of them.
AUTHORITY_VALID = dt.timedelta(days=3650)


def new_key() -> Key:
    """Return a new private key on the curve P-384, which Flower also accepts for nodes."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def key_text(key: Key) -> bytes:
    """Return a private key as a file holds it."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def authority(key: Key) -> x509.Certificate:
    """Return the certificate of a new authority, which may only sign server certificates."""
    return _certificate("feddpc authority", key, AUTHORITY_VALID, None, key, ())


def server(
    key: Key, hosts: Sequence[str], valid: dt.timedelta, signer: x509.Certificate, signer_key: Key
) -> x509.Certificate:
    """Return a certificate for a server with the names and addresses ``hosts``."""
    return _certificate("feddpc server", key, valid, signer, signer_key, hosts)


def _certificate(
    name: str, key: Key, valid: dt.timedelta, signer: x509.Certificate | None, signer_key: Key, hosts: Sequence[str]
) -> x509.Certificate:
    """Return a server's certificate, signed by ``signer``; without one, the certificate of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    signs = signer is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + valid) - dt.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        # Python 3.13 and later require these two.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        for extension in (names, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])):
            builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer_key, SHA384())


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
