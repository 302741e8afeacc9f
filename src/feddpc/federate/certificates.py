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


def authority(key: Key) -> x509.Certificate:
    """Return the certificate of a new authority, which may only sign server certificates."""
    from cryptography import x509

    name = _name("feddpc authority")
    built = _builder(name, name, key, AUTHORITY_VALID)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _signed(_usage(built, signs=True), key, key)


def server(
    key: Key, hosts: Sequence[str], valid: dt.timedelta, signer: x509.Certificate, signer_key: Key
) -> x509.Certificate:
    """Return a certificate for a server with the names and addresses ``hosts``."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    built = (
        _builder(_name("feddpc server"), signer.subject, key, valid)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return _signed(_usage(built, signs=False), signer_key, key)


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, valid: dt.timedelta) -> x509.CertificateBuilder:
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + valid) - dt.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + valid)
    )


def _usage(builder: x509.CertificateBuilder, *, signs: bool) -> x509.CertificateBuilder:
    from cryptography import x509

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
    return builder.add_extension(usage, critical=True)


def _signed(builder: x509.CertificateBuilder, signer: Key, owner: Key) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384

    # Python 3.13 and later require these two.
    return (
        builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(owner.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, SHA384())
    )


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
