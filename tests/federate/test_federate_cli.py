"""`feddpc federate` as a person uses it, as far as no federation has to be started."""

import json
import socket
from importlib import metadata

import pytest

from feddpc.cli import main


def feddpc(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["feddpc", "federate", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    text = capsys.readouterr()
    return end.value.code, text.out, text.err


@pytest.fixture
def federate(monkeypatch, capsys):
    return lambda *arguments: feddpc(monkeypatch, capsys, *arguments)


@pytest.fixture
def without_flower(monkeypatch):
    found = metadata.version

    def version(name):
        if name == "flwr":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)


def test_init_says_what_it_wrote_and_what_to_do(federate, tmp_path):
    code, out, _ = federate("init", tmp_path / "app")
    assert code == 0
    assert str(tmp_path / "app" / "federation" / "task.py") in out
    assert f"feddpc federate demo --app {tmp_path / 'app'}" in out


def test_keys_are_made_and_said_to_whom_they_go(federate, tmp_path):
    code, out, _ = federate("keys", "make", tmp_path / "keys", "--host", "fed.example.org", "--nodes", 2)
    assert code == 0
    assert f"keep {tmp_path / 'keys' / 'ca.key'} secret" in out
    assert (tmp_path / "keys" / "node-1.pub").exists()


def test_check_names_what_is_wrong(federate, tmp_path):
    federate("keys", "make", tmp_path, "--host", "fed.example.org", "--nodes", 1)
    code, out, err = federate("check", "127.0.0.1:1", "--ca", tmp_path / "ca.crt")
    assert (code, err) == (2, "")
    assert out.splitlines()[-1].startswith("error   connection: no server listens at 127.0.0.1:1: start the SuperLink")


@pytest.mark.parametrize(
    "command", [["demo"], ["keys", "make", "k", "--host", "h", "--nodes", 1], ["check", "h:1", "--ca", "c"]]
)
def test_without_flower_the_extra_is_named(federate, without_flower, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, _, err = federate(*command)
    assert code == 2
    assert "pip install 'flwr>=1.41,<1.43'" in err
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_named_before_anything_starts(federate, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = federate("demo", "--port", port, "--out", tmp_path / "out")
    assert code == 2
    assert err == f"error: port {port} on 127.0.0.1 is in use by another program: choose another one\n"
    assert not (tmp_path / "out" / "logs").exists()


def test_an_expired_certificate_is_named_before_anything_starts(federate, tmp_path):
    from feddpc.errors import BadInputError
    from feddpc.federate import keys

    with pytest.raises(BadInputError):
        keys.make(tmp_path / "keys", keys.LOOPBACK, 4, days=-1)
    code, _, err = federate("demo", "--tls", "--resume", "--out", tmp_path)
    assert code == 2
    assert err.startswith(f"error: the certificate {tmp_path / 'keys' / 'server.crt'} expired on 20")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --out FOLDER"),
        (["--method", "fedpdc"], "unknown method 'fedpdc': did you mean 'feddc' or 'feddpc'"),
        (["--app", "nowhere"], "nowhere is no Flower app: it has no pyproject.toml"),
        (["--out", "."], ". is not empty: add --resume to continue a demo"),
    ],
)
def test_bad_wishes(federate, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = federate("demo", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool]\nflwr = 3\n", "lacks method, rounds, clients, cohort, seed, folder"),
        ("[tool.flwr.app.config]\nmethod = 'feddpc'\nrounds = 3\nseed = 0\n", "lacks clients, cohort, folder"),
        ("[tool.flwr\n", "cannot be read as TOML"),
        (
            "[tool.flwr.app.config]\nmethod = 'x'\nrounds = 3\nseed = 0\nclients = 2\ncohort = 3\nfolder = 'f'\n",
            "cohort = 3: must be at most clients = 2",
        ),
    ],
)
def test_an_app_of_somebody_else(federate, tmp_path, text, message):
    (tmp_path / "pyproject.toml").write_text(text)
    code, _, err = federate("demo", "--app", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert message in err


def test_an_app_without_a_key_is_named_before_anything_starts(federate, tmp_path):
    federate("init", tmp_path / "app")
    path = tmp_path / "app" / "pyproject.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("prometheus")))
    code, _, err = federate("demo", "--app", tmp_path / "app", "--out", tmp_path / "out", "--prometheus", "9464")
    assert code == 2
    assert "has no prometheus in [tool.flwr.app.config]" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "h:1"], "HOST:PORT and --ca together"),
        (["check", "--key", "node-0"], "--key needs both"),
        (["check", "--superlink", "mine"], "--superlink needs --keys"),
        (["check", "--keys", "nowhere"], "nowhere/server.crt"),
        (["keys", "rotate-server", "nowhere"], "nowhere/server.crt"),
        (["keys", "revoke", "nowhere", "node-0", "--superlink", "mine"], "nowhere has no key 'node-0'"),
        (["supervise", "nowhere", "mine"], "nowhere is no Flower app"),
    ],
)
def test_what_cannot_be_done_is_named(federate, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = federate(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")


def test_check_on_the_server_is_one_line_each_and_json(federate, tmp_path):
    federate("keys", "make", tmp_path, "--host", "fed.example.org", "--nodes", 2)
    code, out, err = federate("check", "--keys", tmp_path)
    assert (code, err) == (1, "")
    assert [line.split(":")[0].split()[-1] for line in out.splitlines()] == [
        *("feddpc", "flwr", "server.crt", "ca.crt", "server.key", "node-0", "node-1")
    ]
    assert "keys register" in out.splitlines()[-1]
    code, out, _ = federate("check", "--keys", tmp_path, "--json")
    found = json.loads(out)
    assert code == 1
    assert [finding["level"] for finding in found["findings"]] == ["ok"] * 5 + ["warning"] * 2
    assert found["protocols"] == [1, 1]


def test_a_rotation_by_the_commands_that_it_prints(federate, tmp_path):
    keys = tmp_path / "keys"
    federate("keys", "make", keys, "--host", "fed.example.org", "--nodes", 1)
    _, out, _ = federate("keys", "rotate-authority", keys)
    steps = [line.partition("feddpc federate ")[2].split(",")[0].split() for line in out.splitlines()[1:]]
    for step in steps:
        code, _, err = federate(*step)
        assert (code, err) == (0, "")
    code, out, _ = federate("check", "--keys", keys)
    assert "rotation:" not in out


@pytest.mark.parametrize("there", [None, "empty", "foreign"])
def test_a_demo_is_only_resumed_where_there_is_one(federate, tmp_path, there):
    folder = tmp_path / "demo"
    if there is not None:
        folder.mkdir()
    if there == "foreign":
        (folder / "mine.txt").write_text("mine")
    code, _, err = federate("demo", "--resume", "--out", folder)
    assert code == 2
    assert "nothing to resume" in err
    assert not (folder / "app").exists()
