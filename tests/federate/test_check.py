"""`feddpc federate check`: clocks, versions, certificates and keys, one line each, and the exit code."""

import datetime as dt
import json
from email.utils import format_datetime
from importlib import metadata

import pytest

from feddpc._version import __version__
from feddpc.errors import BadInputError
from feddpc.federate import connections, findings, keys
from feddpc.federate.findings import Level
from feddpc.federate.link_checks import check_link, clock_finding
from feddpc.flower import versions
from servers import answering

FLWR = metadata.version("flwr")
API = (200, json.dumps({"info": {"version": FLWR}}).encode())
REGISTERED, UNKNOWN = (400, b'{"code":2003}'), (412, b'{"code":2004}')


def http_date(ahead=0.0):
    return format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(seconds=ahead), usegmt=True)


@pytest.fixture
def made(tmp_path):
    return keys.make(tmp_path / "keys", keys.LOOPBACK, 1)


def look(made, get=API, post=REGISTERED, date=None, key=True):
    with answering(made, get, post, http_date() if date is None else date) as port:
        return check_link(f"127.0.0.1:{port}", made.ca, made.node(0) if key else None)


def one(found, what):
    (finding,) = [finding for finding in found if finding.what.startswith(what)]
    return finding


def test_a_node_for_which_all_is_well(made):
    found = look(made)
    assert findings.worst(found) == Level.ok
    assert [f.what for f in found] == [
        *("connection", "server's certificate", str(made.ca), "clock", "flwr at the SuperLink", "node-0")
    ]
    assert all("\n" not in str(f) for f in found)


@pytest.mark.parametrize("ahead", [-4000.0, -20.0, 20.0, 400.0])
def test_a_clock_that_differs_is_measured(made, ahead):
    finding = one(look(made, date=http_date(-ahead)), "clock")
    assert finding.level == (Level.warning if ahead == -20.0 else Level.error)
    assert f"{'ahead of' if ahead > 0 else 'behind'} the server" in finding.value
    assert float(finding.value.split()[0]) == pytest.approx(abs(ahead), abs=3.0)
    assert "NTP" in finding.remedy


@pytest.mark.parametrize(
    ("ahead", "level"),
    [
        (0.0, "ok"),
        (1.9, "ok"),
        (3.0, "warning"),
        (6.0, "error"),
        (-250.0, "warning"),
        (-304.9, "error"),
        (-306.0, "error"),
    ],
)
def test_the_limits_of_flowers_clock(ahead, level):
    finding = clock_finding(ahead, 0.5)
    assert finding.level == Level[level]
    if level == "error":
        assert "5 s ahead or 305 s behind" in finding.remedy


def test_the_limits_are_those_of_this_flower():
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    from feddpc.federate import link_checks

    assert link_checks.AHEAD == SYSTEM_TIME_TOLERANCE
    assert link_checks.BEHIND == TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def test_the_codes_and_the_request_are_those_of_this_flower(made):
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.error import ApiErrorCode
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    from feddpc.federate import link_checks

    assert link_checks._KNOWN_KEY == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL
    assert link_checks._UNKNOWN_KEY == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
    private, public = link_checks._read_private(made.node(0))
    request = ActivateNodeRequest.FromString(link_checks._field(1, public))
    assert (request.public_key, request.heartbeat_interval) == (public, 0.0)
    assert verify_signature(bytes_to_public_key(public), b"now", link_checks._sign(private, b"now"))
    assert {FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER} == {"flwr-public-key", "flwr-signature"}


@pytest.mark.parametrize(
    ("post", "level", "words"),
    [
        (REGISTERED, "ok", "registered at the SuperLink"),
        (UNKNOWN, "error", "not registered at the SuperLink, or revoked"),
        ((401, b'{"detail":"Invalid SuperNode authentication"}'), "error", "refuses its signature"),
        ((502, b"<html>"), "warning", "502"),
        ((200, b"[]"), "warning", "200"),
        ((200, b"[" * 60_000), "warning", "200"),
    ],
)
def test_a_key_is_looked_up(made, post, level, words):
    finding = one(look(made, post=post), "node-0")
    assert finding.level == Level[level]
    assert words in finding.value


def test_the_request_is_signed_with_the_present_time(made):
    seen = {}

    def post(headers):
        seen.update(headers)
        return REGISTERED

    look(made, post=post)
    age = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(seen["flwr-timestamp"])
    assert abs(age) < dt.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("get", "level"),
    [
        (API, "ok"),
        ((200, b'{"info": {"version": "1.99.0"}}'), "warning"),
        ((404, b"no"), "ok"),
        ((200, b"[" * 10**6), "ok"),
    ],
)
def test_flower_at_the_superlink_is_compared_where_it_shows(made, get, level):
    assert one(look(made, get=get), "flwr at the SuperLink").level == Level[level]


def test_an_answer_without_a_date(made):
    assert one(look(made, date=""), "clock").level == Level.warning


def test_a_certificate_that_will_expire_soon_is_a_warning_with_the_command(tmp_path):
    made = keys.make(tmp_path, keys.LOOPBACK, 1, days=20)
    for found, what in ((look(made), "server's certificate"), (findings.check_folder(tmp_path), "server.crt")):
        finding = one(found, what)
        assert finding.level == Level.warning
        assert "19 days" in finding.value
        assert "rotate-server" in finding.remedy


def test_an_expired_certificate_is_an_error_everywhere(tmp_path):
    with pytest.raises(BadInputError):
        keys.make(tmp_path, keys.LOOPBACK, 1, days=-1)
    made = keys.Keys(tmp_path)
    assert findings.worst(findings.check_folder(tmp_path)) == Level.error
    keys.new_node_key(made.node(0))
    (finding,) = look(made)
    assert "expired" in finding.value


def test_nobody_listens(made):
    (finding,) = check_link(f"127.0.0.1:{connections.free_ports(1)[0]}", made.ca, None)
    assert finding.level == Level.error


def test_a_key_of_another_kind_is_named(made):
    made.node(0).write_text("nothing")
    with pytest.raises(BadInputError, match="node-0 is no private key in OpenSSH's form"):
        look(made)


def test_a_private_key_that_others_may_read(made):
    made.ca_key.chmod(0o644)
    finding = one(findings.check_folder(made.folder), "ca.key")
    assert finding.level == Level.warning
    assert "chmod 600" in finding.remedy


# The other end.


def peer(tmp_path, **changes):
    path = tmp_path / "peer.json"
    path.write_text(json.dumps(json.loads(findings.report([])) | changes))
    return path


def test_what_one_machine_prints_the_other_compares(tmp_path):
    assert findings.worst(findings.check_versions(peer(tmp_path))) == Level.ok
    assert findings.worst(findings.check_versions(peer(tmp_path, feddpc="9.9.9", protocols=[1, 7]))) == Level.ok


def test_ends_without_a_common_protocol(tmp_path):
    newest = versions.NEWEST
    finding = one(
        findings.check_versions(peer(tmp_path, feddpc="9.9.9", protocols=[newest + 1, newest + 2])), "protocol"
    )
    assert finding.level == Level.error
    assert f"feddpc 9.9.9 with protocols {newest + 1} to {newest + 2}" in finding.value
    assert f"feddpc {__version__}" in finding.value
    assert finding.remedy == "upgrade this machine"


def test_another_flower_at_the_other_end_is_a_warning(tmp_path):
    assert findings.worst(findings.check_versions(peer(tmp_path, flwr="1.99.1"))) == Level.warning


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"protocols": [1], "feddpc": 1, "flwr": 1}', "\xff"])
def test_a_report_that_is_none_is_named(tmp_path, text):
    (tmp_path / "p").write_text(text, encoding="latin-1")
    with pytest.raises(BadInputError, match="check --json"):
        findings.check_versions(tmp_path / "p")
