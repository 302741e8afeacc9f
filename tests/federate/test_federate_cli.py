"""`feddpc federate` as a person uses it, as far as no federation has to be started."""

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
    code, out, _ = federate("keys", tmp_path / "keys", "--host", "fed.example.org", "--nodes", 2)
    assert code == 0
    assert f"keep {tmp_path / 'keys' / 'ca.key'} secret" in out
    assert (tmp_path / "keys" / "node-1.pub").exists()


def test_check_names_what_is_wrong(federate, tmp_path):
    federate("keys", tmp_path, "--host", "fed.example.org", "--nodes", 1)
    code, _, err = federate("check", "127.0.0.1:1", "--ca", tmp_path / "ca.crt")
    assert code == 2
    assert err.startswith("error: no server listens at 127.0.0.1:1: start the SuperLink there")


@pytest.mark.parametrize(
    "command", [["demo"], ["keys", "k", "--host", "h", "--nodes", 1], ["check", "h:1", "--ca", "c"]]
)
def test_without_flower_the_extra_is_named(federate, without_flower, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, _, err = federate(*command)
    assert code == 2
    assert "pip install 'feddpc[flower]'" in err
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
