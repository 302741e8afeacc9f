"""Certificates and keys: what is made is good, and what is not good is refused by name before anything starts."""

import datetime as dt
import shutil
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from feddpc.errors import BadInputError
from feddpc.federate import keys


def test_a_node_has_its_own_key_pair_in_the_form_of_openssh(tmp_path):
    made = keys.make(tmp_path, ["localhost"], 2)
    private = [load_ssh_private_key(made.node(i).read_bytes(), None) for i in range(2)]
    public = [load_ssh_public_key((tmp_path / f"node-{i}.pub").read_bytes()) for i in range(2)]
    assert all(isinstance(key.curve, ec.SECP384R1) for key in private)
    assert [key.public_key() for key in private] == public
    assert private[0].public_key() != private[1].public_key()


def test_private_keys_are_for_their_owner_only(tmp_path):
    made = keys.make(tmp_path, ["localhost"], 1)
    for path in (made.ca_key, made.server_key, made.node(0)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nodes_are_added_later_and_what_is_there_stays(tmp_path):
    made = keys.make(tmp_path, ["localhost"], 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    keys.make(tmp_path, ["localhost"], 3)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert made.node(2).exists()


def test_a_certificate_is_good_for_all_its_hosts_and_for_so_many_days(tmp_path):
    made = keys.make(tmp_path, ["fed.example.org", "10.1.2.3", "::1"], 1, days=30)
    server = keys.read_certificate(made.server)
    assert keys.names_of(server) == ["fed.example.org", "10.1.2.3", "::1"]
    left = server.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29.9) < left <= dt.timedelta(days=30)


def refused(made, host="localhost"):
    with pytest.raises(BadInputError) as error:
        keys.check(made, host)
    return str(error.value)


def test_an_expired_certificate_is_named_with_its_date(tmp_path):
    with pytest.raises(BadInputError, match=r"the certificate .*server\.crt expired on 20\d\d-\d\d-\d\d .* UTC"):
        keys.make(tmp_path, ["localhost"], 1, days=-1)


def test_a_certificate_of_the_future_is_named(tmp_path, monkeypatch):
    made = keys.make(tmp_path, ["localhost"], 1)

    class Earlier(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return dt.datetime(2020, 1, 1, tzinfo=tz)

    monkeypatch.setattr(keys.dt, "datetime", Earlier)
    assert "server.crt is not valid before 20" in refused(made)


def test_a_certificate_of_another_authority_is_named(tmp_path):
    made = keys.make(tmp_path / "ours", ["localhost"], 1)
    other = keys.make(tmp_path / "theirs", ["localhost"], 1)
    shutil.copy(other.ca, made.ca)
    assert "server.crt was not signed by" in refused(made)


def test_a_certificate_for_another_host_is_named_with_its_hosts(tmp_path):
    made = keys.make(tmp_path, ["fed.example.org", "10.1.2.3"], 1)
    assert "server.crt is for fed.example.org, 10.1.2.3, not for localhost" in refused(made)


def test_a_key_that_does_not_belong_to_the_certificate_is_named(tmp_path):
    made = keys.make(tmp_path / "ours", ["localhost"], 1)
    other = keys.make(tmp_path / "theirs", ["localhost"], 1)
    shutil.copy(other.server_key, made.server_key)
    assert "server.key does not belong to the certificate" in refused(made)


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key"])
def test_a_file_that_is_something_else_is_named(tmp_path, name):
    made = keys.make(tmp_path, ["localhost"], 1)
    (tmp_path / name).write_text("nothing of the kind")
    assert f"{name} is no" in refused(made)
