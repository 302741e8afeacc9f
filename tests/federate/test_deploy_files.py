"""The files of deploy/ and the commands of the documents: every command line parses, and the files agree."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import warnings
from itertools import takewhile
from pathlib import Path

import pytest
import typer
import yaml
from flwr.common import constant
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode.fleet_http_client import FleetHttpClient

from feddpc.cli import app as feddpc_cli
from feddpc.cli.flags import UNFINISHED
from feddpc.config import read_toml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in DEPLOY.glob("compose.*.yaml")}
UNITS = {path.stem: path.read_text().replace("\\\n", " ") for path in (DEPLOY / "systemd").glob("*.service")}
with warnings.catch_warnings():  # Flower's own, about typer
    warnings.simplefilter("ignore")
    from flwr.cli.app import app as flwr_cli
DOCUMENTS = ("docs/operations.md", "docs/federation.md", "src/feddpc/federate/template/README.md.txt")
PROGRAMS = ("feddpc", "flwr", "flower-superlink", "flower-supernode")


def environment():
    lines = (DEPLOY / "environment").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def fill(text):
    """Replace ${NAME} by what deploy/environment says."""
    return re.sub(r"\$\{(\w+)\}", lambda found: environment()[found[1]], text)


def commands():
    """Yield where each command line of a program of ours or Flower's stands, and its words."""
    for name, content in COMPOSE.items():
        for service, about in content["services"].items():
            yield f"{name}, {service}", shlex.split(fill(about["command"]))
    for name, text in UNITS.items():
        yield name, shlex.split(fill(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1]))
    for name in DOCUMENTS:
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                with contextlib.suppress(ValueError):  # no command line: a quotation mark alone
                    words = without_prefix(shlex.split(line, comments=True))
                    if words and Path(words[0]).name in PROGRAMS:
                        yield f"{name}: {line.strip()[:90]}", words
        for line in re.findall(r"`(sudo as-feddpc [^`]*)`", text):
            yield f"{name}: {line[:90]}", without_prefix(shlex.split(line.replace("RUN_ID", "1")))


def without_prefix(words):
    """The words of a command without what says where it runs, and as whom: sudo, our wrapper, a container."""
    if words[:1] == ["docker"] and "federate" in words:
        return words[words.index("federate") - 1 :]
    prefixes = takewhile(lambda word: word in ("sudo", "as-feddpc"), words)
    return words[len(list(prefixes)) :]


COMMANDS = [pytest.param(words, id=where) for where, words in commands() if Path(words[0]).name in PROGRAMS]


def parse(cli, words):
    """Parse a command line of a typer app, without running it."""
    command = typer.main.get_command(cli)
    context = command.make_context(words[0], list(words[1:]))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_line_parses(words):
    program = Path(words[0]).name
    if program in ("feddpc", "flwr"):
        parse({"feddpc": feddpc_cli, "flwr": flwr_cli}[program], words)
        return
    part = program.removeprefix("flower-")
    module = importlib.import_module(f"flwr.{part}.cli.flower_{part}")
    parser = getattr(module, f"_parse_args_run_{part}")()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            parser.parse_args(words[1:])
        except SystemExit:
            pytest.fail(errors.getvalue())


def test_there_are_commands_in_every_place():
    places = {str(param.id).partition(":")[0] for param in COMMANDS}
    assert {*DOCUMENTS, *UNITS, "compose.node.yaml, supernode", "compose.server.yaml, superlink"} <= places
    words = [" ".join(param.values[0]) for param in COMMANDS if "operations.md" in str(param.id)]
    for part in ("keys make", "keys register", "keys revoke", "keys rotate-node", "check --keys", "init", "flwr run"):
        assert any(part in line for line in words), part


def test_every_command_of_the_operator_says_as_whom_it_runs():
    """Keys and state belong to the user of the units, and commands find the SuperLink by FLWR_HOME."""
    text = (ROOT / "docs" / "operations.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    own = [line for line in lines if re.search(r"(^|[ /])(feddpc|flwr) (federate|run|stop|list|report)\b", line)]
    assert len(own) >= 6
    assert [line for line in own if not line.startswith(("sudo as-feddpc ", "sudo /opt/feddpc/bin/", "docker "))] == []


def test_the_wrapper_gives_commands_the_variables_and_the_folder_of_the_units(tmp_path):
    """With a program in the place of runuser that changes no user."""
    (tmp_path / "runuser").write_text('#!/bin/sh\n[ "$*" = "${*#--user feddpc -- }" ] && exit 9\nshift 3\nexec "$@"\n')
    (tmp_path / "runuser").chmod(0o755)
    script = (DEPLOY / "as-feddpc").read_text().replace("/etc/feddpc/environment", str(DEPLOY / "environment"))
    (tmp_path / "script").write_text(script.replace("/var/lib/feddpc", str(tmp_path)))
    command = ["sh", str(tmp_path / "script"), "sh", "-c", 'env; umask; echo "$1"', "sh", "two words"]
    outer = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FLWR_HOME": "/elsewhere", "SECRET": "1"}
    done = subprocess.run(command, env=outer, capture_output=True, text=True, check=True)
    *lines, mask, last = done.stdout.splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert environment().items() <= found.items()
    assert (found["HOME"], found["PWD"], mask, last) == (str(tmp_path), str(tmp_path), "0077", "two words")
    assert "SECRET" not in found
    assert all("User=feddpc" in unit and "UMask=0077" in unit for unit in UNITS.values())
    assert all("WorkingDirectory=/var/lib/feddpc" in unit for unit in UNITS.values())


def test_keys_are_registered_from_a_container_that_may_write_them():
    services = COMPOSE["compose.server.yaml"]["services"]
    keys = services["keys"]
    assert "./keys:/etc/feddpc/keys" in keys["volumes"]  # it notes the nodes' ids there
    assert "./config.toml:/var/lib/feddpc/flwr/config.toml:ro" in keys["volumes"]
    assert keys["network_mode"] == services["supervisor"]["network_mode"]  # the SuperLink listens on loopback
    assert keys["profiles"]  # so `up` does not start it
    others = [volume for name, about in services.items() if name != "keys" for volume in about["volumes"]]
    assert {volume for volume in others if "keys" in volume} == {"./keys:/etc/feddpc/keys:ro"}
    text = (ROOT / "docs" / "operations.md").read_text()
    assert "docker compose --file deploy/compose.server.yaml run --rm keys\n" in text


def test_units_and_containers_run_the_same_commands():
    def words(text):
        return [Path(word).name for word in shlex.split(text)]

    server, node = COMPOSE["compose.server.yaml"]["services"], COMPOSE["compose.node.yaml"]["services"]
    for service, unit in {"superlink": "superlink", "supervisor": "supervisor", "supernode": "supernode"}.items():
        started = re.search(r"^ExecStart=(.*)$", UNITS[f"feddpc-{unit}"], re.MULTILINE)[1]
        assert words(started) == words({**server, **node}[service]["command"])


def test_a_run_that_was_stopped_or_given_up_is_not_submitted_again_by_a_restart():
    """A supervisor ends with 0 if somebody stopped its run; containers cannot tell the other codes apart."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", UNITS["feddpc-supervisor"], re.MULTILINE))
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"].split() == ["2", str(UNFINISHED)]
    assert COMPOSE["compose.server.yaml"]["services"]["supervisor"]["restart"] == "no"


def test_ports_and_files_agree():
    nginx = (DEPLOY / "nginx.conf").read_text()
    link = shlex.split(COMPOSE["compose.server.yaml"]["services"]["superlink"]["command"])
    port = link[link.index("--port") + 1]
    assert f"server 127.0.0.1:{port};" in nginx
    assert read_toml(DEPLOY / "config.toml")["superlink"]["mine"]["address"] == f"127.0.0.1:{port}"
    (published,) = COMPOSE["compose.server.yaml"]["services"]["superlink"]["ports"]
    outside = re.search(r"listen (\d+) ssl;", nginx)[1]
    assert published == f"{outside}:{outside}"
    assert environment()["SERVER"].endswith(f":{outside}")
    named = set(re.findall(r"/etc/feddpc/keys/([\w.]+)", nginx + "".join(UNITS.values())))
    assert named == {"ca.crt", "server.crt", "server.key", "node"}


def test_the_proxy_passes_on_what_nodes_use_and_nothing_else():
    nginx = (DEPLOY / "nginx.conf").read_text()
    (location,) = re.findall(r"location (\S+) \{[^}]*proxy_pass", nginx)
    paths = []

    class Recorder(FleetHttpClient):
        def __init__(self):
            pass

        def _unary_unary(self, *, path, **_):
            paths.append(path)

    calls = {name for name, value in vars(FleetHttpClient).items() if callable(value) and not name.startswith("_")}
    for name in calls:
        getattr(Recorder(), name)(None)
    assert len(paths) >= 10
    assert all(path.startswith(location) for path in paths)
    assert hasattr(ProtobufClient, "_unary_unary")


def test_the_proxys_limit_holds_a_piece_of_a_model():
    limit = int(re.search(r"client_max_body_size (\d+)m;", (DEPLOY / "nginx.conf").read_text())[1]) * 2**20
    assert limit >= constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 2**20


def test_the_container_sets_what_the_units_set():
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    container = dict(pair.split("=", 1) for pair in re.search(r"^ENV (.*)$", text, re.MULTILINE)[1].split())
    units = environment()
    assert container == {key: units[key] for key in units if key not in ("PATH", "SERVER", "CLIENT", "CLIENTS")}
