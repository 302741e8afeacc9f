"""Ports and connections: is a port free, does a server answer, and is its certificate valid."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

from feddpc.errors import BadInputError
from feddpc.federate import keys

#: Where the processes of a demo listen; other machines cannot reach them there.
HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def check_free(port: int, host: str = HOST) -> None:
    """Raise if a port cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "is in use by another program" if in_use else f"cannot be used ({error})"
        raise BadInputError(f"port {port} on {host} {why}: choose another one") from None


def is_listening(port: int, host: str = HOST) -> bool:
    """Return whether a server answers at a port."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    >>> split("[::1]:8443")
    ('::1', 8443)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInputError(f"{address!r} is no address: write HOST:PORT, like federation.example.org:8443")
    return host.strip("[]"), int(port)


def check_server(address: str, ca: Path, timeout: float = 10.0) -> str:
    """Connect as a node does, and describe the server's certificate; raise if a node would refuse it."""
    host, port = split(address)
    keys.read_certificate(ca)
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with (
            socket.create_connection((host, port), timeout=timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = secure.getpeercert() or {}
            return f"{address} is who it says: certificate good until {certificate.get('notAfter')}, {secure.version()}"
    except ssl.SSLCertVerificationError as error:
        raise BadInputError(_untrusted(address, ca, error)) from None
    except ssl.SSLError as error:
        raise BadInputError(
            f"{address} answers, but not with TLS ({error.reason}): start the SuperLink with --ssl-certfile, not with "
            "--insecure"
        ) from None
    except ConnectionRefusedError:
        raise BadInputError(f"no server listens at {address}: start the SuperLink there, or correct the port") from None
    except TimeoutError:
        raise BadInputError(
            f"{address} does not answer within {timeout:.0f} s: a firewall on the way may drop packets"
        ) from None
    except OSError as error:
        raise BadInputError(f"{address} cannot be reached: {error}") from None


#: OpenSSL's codes for certificate errors.
_EXPIRED, _NOT_YET, _WRONG_NAME, _WRONG_ADDRESS = 10, 9, 62, 64


def _untrusted(address: str, ca: Path, error: ssl.SSLCertVerificationError) -> str:
    host, port = split(address)
    if error.verify_code in (_EXPIRED, _NOT_YET, _WRONG_NAME, _WRONG_ADDRESS):
        shown = keys.certificate_of(ssl.get_server_certificate((host, port), timeout=10.0).encode(), address)
        if why := keys.out_of_date(shown):
            remedy = "make a new one there with `feddpc federate keys rotate-server FOLDER`"
            return f"the certificate of {address} {why}: {remedy}"
        if error.verify_code in (_WRONG_NAME, _WRONG_ADDRESS):
            names = ", ".join(keys.names_of(shown)) or "no host at all"
            return (
                f"the certificate of {address} is for {names}, not for {host}: use one of these, or make a new one "
                f"there with `feddpc federate keys rotate-server FOLDER --host {host}`"
            )
    return (
        f"the certificate of {address} was not signed by {ca} ({error.verify_message}): take ca.crt from the server; "
        "if it is that one, another server answers there"
    )
