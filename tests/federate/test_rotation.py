"""Replacing certificates and keys: nodes with the old files and nodes with the new ones both get in meanwhile."""

import datetime as dt
import itertools
import stat

import pytest

from feddpc.errors import BadInputError
from feddpc.federate import connections, findings, keys, rotation
from feddpc.federate.flower_cli import KEY_IN_USE, NODE_NOT_FOUND, FlowerCliError
from feddpc.federate.link_checks import check_nodes
from feddpc.federate.node_keys import NodeKeys, fingerprint
from servers import showing


class Link:
    """A SuperLink that behaves like Flower's: ids are its own, and a removed key never comes back."""

    connection = "mine"
    ids = itertools.count(10**18)

    def __init__(self):
        self.known, self.removed = {}, set()

    def register(self, public_key, name):
        text = public_key.read_text()
        if text in self.known.values():
            raise FlowerCliError("Public key already in use.", KEY_IN_USE)
        node_id = str(next(self.ids))
        self.known[node_id] = text
        return node_id

    def unregister(self, node_id):
        if node_id not in self.known or node_id in self.removed:
            raise FlowerCliError("Node ID not found for account.", NODE_NOT_FOUND)
        self.removed.add(node_id)

    def nodes(self):
        return {n: "unregistered" if n in self.removed else "offline" for n in self.known}


@pytest.fixture
def made(tmp_path):
    return keys.make(tmp_path / "keys", keys.LOOPBACK, 2)


def accepted(made, ca):
    """Whether a node with an authority's certificate would accept the server."""
    with showing(made) as port:
        try:
            connections.check_server(f"127.0.0.1:{port}", ca)
        except BadInputError:
            return False
    return True


def copy(path, name):
    other = path.with_name(name)
    other.write_bytes(path.read_bytes())
    return other


def lines(found, level):
    return [str(finding) for finding in found if finding.level == findings.Level[level]]


def test_git_ignores_the_folder(made):
    assert (made.folder / ".gitignore").read_text() == "*\n"


def test_a_new_server_certificate_needs_nothing_at_the_nodes(made):
    before = keys.read_certificate(made.server)
    rotation.rotate_server(made, days=90)
    after = keys.read_certificate(made.server)
    assert after.serial_number != before.serial_number
    assert keys.names_of(after) == keys.names_of(before)
    assert after.not_valid_after_utc - dt.datetime.now(dt.UTC) > dt.timedelta(days=89)
    assert accepted(made, made.ca)
    assert stat.S_IMODE(made.server_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.server_key.with_name("server.key.old").stat().st_mode) == 0o600


def test_a_certificate_for_other_hosts(made):
    rotation.rotate_server(made, ["fed.example.org"])
    assert keys.names_of(keys.read_certificate(made.server)) == ["fed.example.org"]


def test_the_authority_is_replaced_without_a_moment_in_which_a_node_is_refused(made):
    old = copy(made.ca, "old.crt")
    rotation.begin_authority(made)
    both = copy(made.ca, "both.crt")
    assert len(keys.read_certificates(both)) == 2
    assert accepted(made, old)
    assert accepted(made, both)
    assert any(
        "under way, server.crt is of the old" in line for line in lines(findings.check_folder(made.folder), "warning")
    )

    rotation.rotate_server(made)  # every node has `both` now
    assert accepted(made, both)
    assert not accepted(made, old)

    rotation.finish_authority(made)
    assert len(keys.read_certificates(made.ca)) == 1
    assert accepted(made, made.ca)
    assert accepted(made, both)
    assert not made.ca_key.with_name("ca.key.old").exists()
    assert lines(findings.check_folder(made.folder), "warning") == []


def test_steps_out_of_order_are_refused_with_the_step_that_is_due(made):
    with pytest.raises(BadInputError, match="no rotation is under way"):
        rotation.finish_authority(made)
    rotation.begin_authority(made)
    before = made.ca.read_bytes()
    with pytest.raises(BadInputError, match="rotation is under way"):
        rotation.begin_authority(made)
    with pytest.raises(BadInputError, match="rotate-server"):
        rotation.finish_authority(made)
    assert made.ca.read_bytes() == before


def test_a_node_gets_a_new_key_and_keeps_the_old_one_until_it_is_revoked(made):
    link, nodes = Link(), NodeKeys(made.folder)
    nodes.register(link)
    old = fingerprint(made.folder / "node-0.pub")
    rotation.rotate_node(made, 0)
    nodes = NodeKeys(made.folder)
    nodes.rename("node-0", "node-0.old")
    (new,) = nodes.register(link, ["node-0"])
    assert fingerprint(made.folder / "node-0.pub") != old == fingerprint(made.folder / "node-0.old.pub")
    assert sorted(set(link.nodes().values())) == ["offline"]
    (warning,) = lines(check_nodes(made.folder, link), "warning")
    assert "node-0.old: still valid" in warning
    with pytest.raises(BadInputError, match=r"revoke .* node-0\.old"):
        rotation.rotate_node(made, 0)

    NodeKeys(made.folder).revoke(link, "node-0.old")
    assert link.nodes()[new.node_id] == "offline"
    assert len(link.removed) == 1
    assert not (made.folder / "node-0.old").exists()
    assert lines(check_nodes(made.folder, link), "warning") == []
    rotation.rotate_node(made, 0)


def test_registering_twice_registers_once(made):
    link = Link()
    assert [entry.name for entry in NodeKeys(made.folder).register(link)] == ["node-0", "node-1"]
    assert NodeKeys(made.folder).register(link) == []
    keys.make(made.folder, keys.LOOPBACK, 3)
    assert [entry.name for entry in NodeKeys(made.folder).register(link)] == ["node-2"]


def test_a_revoked_key_is_gone_and_cannot_come_back(made):
    link = Link()
    NodeKeys(made.folder).register(link)
    public, private = (made.folder / "node-1.pub").read_bytes(), made.node(1).read_bytes()
    NodeKeys(made.folder).revoke(link, "node-1")
    assert not made.node(1).exists()
    assert any("revoked" in line for line in lines(check_nodes(made.folder, link), "ok"))
    (made.folder / "node-1.pub").write_bytes(public)  # from a back-up
    made.node(1).write_bytes(private)
    with pytest.raises(BadInputError, match="was revoked on"):
        NodeKeys(made.folder).register(link)
    (error,) = lines(check_nodes(made.folder, link), "error")
    assert "removed from the SuperLink" in error


def test_a_key_that_was_registered_elsewhere_is_named_and_revoked_by_its_id(made):
    link = Link()
    node_id = link.register(made.folder / "node-0.pub", "by hand")
    with pytest.raises(BadInputError, match=r"knows .* already"):
        NodeKeys(made.folder).register(link)
    with pytest.raises(BadInputError, match="--node-id"):
        NodeKeys(made.folder).revoke(link, "node-0")
    NodeKeys(made.folder).revoke(link, "node-0", node_id)
    assert link.removed == {node_id}


def test_a_superlink_without_its_database_is_noticed_and_gets_the_keys_again(made):
    NodeKeys(made.folder).register(Link())
    fresh = Link()  # the same one, started without its database
    errors = lines(check_nodes(made.folder, fresh), "error")
    assert len(errors) == 2
    assert all(f"`feddpc federate keys register {made.folder} --superlink NAME`" in error for error in errors)
    added = NodeKeys(made.folder).register(fresh)
    assert [entry.name for entry in added] == ["node-0", "node-1"]
    assert {entry.node_id for entry in added} == set(fresh.known)
    assert lines(check_nodes(made.folder, fresh), "error") == []
    assert NodeKeys(made.folder).register(fresh) == []


def test_a_revoked_key_stays_out_of_a_superlink_that_lost_its_database(made):
    link = Link()
    NodeKeys(made.folder).register(link)
    public = (made.folder / "node-1.pub").read_bytes()
    NodeKeys(made.folder).revoke(link, "node-1")
    (made.folder / "node-1.pub").write_bytes(public)  # from a back-up
    with pytest.raises(BadInputError, match="was revoked on"):
        NodeKeys(made.folder).register(Link())


def files_of(made):
    return {path.name: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("registered", [True, False])
def test_a_wrong_id_revokes_nothing(made, registered):
    link = Link()
    node_id = NodeKeys(made.folder).register(link)[0].node_id if registered else "1"
    before = files_of(made)
    with pytest.raises(BadInputError, match=r"12345.*nothing was changed"):
        NodeKeys(made.folder).revoke(link, "node-0", "12345")
    assert files_of(made) == before
    assert link.removed == set()
    if registered:
        assert NodeKeys(made.folder).revoke(link, "node-0").node_id == node_id
        assert link.removed == {node_id}


def test_the_id_of_another_node_revokes_nothing(made):
    """Else that node would be shut out, and this key would be recorded as revoked while it stays valid."""
    link = Link()
    _, other = NodeKeys(made.folder).register(link)
    before = files_of(made)
    with pytest.raises(BadInputError, match=f"{other.node_id}.*nothing was changed"):
        NodeKeys(made.folder).revoke(link, "node-0", other.node_id)
    assert files_of(made) == before
    assert link.removed == set()


def test_a_node_that_somebody_removed_from_the_superlink_is_noted_as_revoked(made):
    link = Link()
    entry, _ = NodeKeys(made.folder).register(link)
    link.unregister(entry.node_id)
    assert NodeKeys(made.folder).revoke(link, "node-0").revoked
    assert not made.node(0).exists()


def test_a_node_that_a_superlink_without_its_database_does_not_know_is_not_noted_as_revoked(made):
    """Its key would be registered again from a back-up of that database."""
    NodeKeys(made.folder).register(Link())
    before = files_of(made)
    with pytest.raises(BadInputError, match="nothing was changed"):
        NodeKeys(made.folder).revoke(Link(), "node-0")
    assert files_of(made) == before


@pytest.mark.parametrize("name", ["node-7", "ca", "../node-0"])
def test_a_key_that_is_not_there_is_named(made, name):
    with pytest.raises(BadInputError, match="it has node-0, node-1"):
        NodeKeys(made.folder).revoke(Link(), name)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', '{"a": {"x": 1}}'])
def test_a_damaged_list_of_nodes_is_named(made, text):
    (made.folder / "nodes.json").write_text(text)
    with pytest.raises(BadInputError, match=r"nodes\.json cannot be read"):
        NodeKeys(made.folder)


def test_a_file_that_is_no_public_key_is_named(made):
    (made.folder / "node-0.pub").write_text("nothing")
    with pytest.raises(BadInputError, match=r"node-0\.pub is no public key"):
        NodeKeys(made.folder).register(Link())
