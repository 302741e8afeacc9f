"""Ports and servers: what is wrong with them is said before a node would try for ever."""

import socket

import pytest

from feddpc.errors import BadInputError
from feddpc.federate import connections, keys
from servers import listening, showing


def refused(port, ca, host="127.0.0.1"):
    with pytest.raises(BadInputError) as error:
        connections.check_server(f"{host}:{port}", ca)
    return str(error.value)


def test_free_ports_are_different_and_can_be_listened_on():
    ports = connections.free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        connections.check_free(port)
        assert not connections.is_listening(port)


def test_a_port_in_use_is_named():
    with listening() as port:
        assert connections.is_listening(port)
        with pytest.raises(BadInputError, match=f"port {port} on 127.0.0.1 is in use by another program: choose"):
            connections.check_free(port)


@pytest.mark.parametrize("text", ["here", "here:", ":8443", "here:port", "here:0", "here:65536"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(BadInputError, match="write HOST:PORT"):
        connections.split(text)


@pytest.mark.parametrize("host", keys.LOOPBACK)
def test_a_server_that_is_who_it_says(tmp_path, host):
    made = keys.make(tmp_path, keys.LOOPBACK, 1)
    with showing(made) as port:
        assert connections.check_server(f"{host}:{port}", made.ca).startswith(f"{host}:{port} is who it says")


def test_a_server_with_an_expired_certificate(tmp_path):
    with pytest.raises(BadInputError):
        keys.make(tmp_path, keys.LOOPBACK, 1, days=-1)
    made = keys.Keys(tmp_path)
    with showing(made) as port:
        assert f"the certificate of 127.0.0.1:{port} expired on 20" in refused(port, made.ca)


def test_a_server_of_another_authority(tmp_path):
    made = keys.make(tmp_path / "ours", keys.LOOPBACK, 1)
    other = keys.make(tmp_path / "theirs", keys.LOOPBACK, 1)
    with showing(other) as port:
        assert f"the certificate of 127.0.0.1:{port} was not signed by {made.ca}" in refused(port, made.ca)


def test_a_server_with_a_certificate_for_another_host(tmp_path):
    made = keys.make(tmp_path, ["fed.example.org"], 1)
    with showing(made) as port:
        for host in keys.LOOPBACK:
            assert f"is for fed.example.org, not for {host}" in refused(port, made.ca, host)


def test_a_server_without_tls(tmp_path):
    made = keys.make(tmp_path, keys.LOOPBACK, 1)
    with listening() as port:
        assert "answers, but not with TLS" in refused(port, made.ca)


def test_nobody_there(tmp_path):
    made = keys.make(tmp_path, keys.LOOPBACK, 1)
    assert "no server listens at" in refused(connections.free_ports(1)[0], made.ca)


def test_somebody_who_does_not_answer(tmp_path):
    made = keys.make(tmp_path, keys.LOOPBACK, 1)
    with socket.create_server((connections.HOST, 0)) as silent, pytest.raises(BadInputError, match="a firewall"):
        connections.check_server(f"127.0.0.1:{silent.getsockname()[1]}", made.ca, timeout=0.2)
