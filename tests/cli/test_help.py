"""Help texts and messages for mistyped commands and flags."""

import re
import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.config import PER_RUN_KEYS, keys

TOP = typer.main.get_command(app)
CONTEXT = click.Context(TOP)


def commands(command, path=()):
    """Return the words of every command and group."""
    found = [path]
    for name in command.list_commands(CONTEXT) if isinstance(command, click.Group) else ():
        found += commands(command.get_command(CONTEXT, name), (*path, name))
    return found


def invoke(*args):
    return CliRunner().invoke(app, list(args))


ALL = commands(TOP)


def test_all_commands_are_found():
    assert {(), ("run",), ("sweep",), ("sweep", "show"), ("federate", "demo"), ("reproduce", "table2")} <= set(ALL)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_no_backslash_and_one_default_per_option(path):
    done = invoke(*path, "--help")
    assert done.exit_code == 0
    assert "\\" not in done.output
    options = re.split(r"\n  (?=-)", done.output.partition("\nCommands:")[0])
    assert len(options) > 1
    for option in options:
        assert len(re.findall(r"\[default:", option)) <= 1, option


@pytest.mark.parametrize(("typed", "meant"), [(["rn"], "run"), (["sweep", "shwo"], "show"), (["data", "gte"], "get")])
def test_a_mistyped_command_is_corrected_once(typed, meant):
    done = invoke(*typed)
    assert done.exit_code == 2
    assert done.output.count("Did you mean") == 1
    assert f"'{meant}'" in done.output
    assert f"'{typed[-1]}'" in done.output


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_every_key_is_a_flag(command):
    parameters = TOP.get_command(CONTEXT, command).params
    shown = {flag for parameter in parameters for flag in parameter.opts}
    left_out = () if command == "run" else PER_RUN_KEYS
    for name, facts in keys().items():
        if facts.options_of in (None, name) and name not in left_out:
            assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("flag", "key"),
    [("--weighting", "weighting=VALUE"), ("--lr-decay", "lr_decay=VALUE"), ("--privacy", "privacy.KEY=VALUE")],
)
def test_a_key_that_is_no_flag_is_set_with_set(flag, key):
    done = invoke("partition", flag, "1")
    assert done.exit_code == 2
    assert flag in done.output
    assert f"--set {key}" in re.sub(r"\s+", " ", done.output)


def test_a_hyper_parameter_is_set_with_set():
    assert "--set lam=VALUE" in re.sub(r"\s+", " ", invoke("run", "--lam", "2").output)


def test_other_unknown_flags_are_as_before():
    for args in (["run", "--nonsense"], ["bench", "--weighting", "x"]):
        done = invoke(*args)
        assert done.exit_code == 2
        assert "No such option" in done.output
        assert "--set" not in done.output
    assert "--rounds" in invoke("run", "--round", "3").output


def test_the_help_imports_no_command():
    """It takes less than a tenth of a second, because it imports only what it prints."""
    code = (
        "import sys; sys.argv = ['feddpc', '--help']\nfrom feddpc.cli import main\n"
        "try:\n main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "numpy", "rich", "feddpc.config", "feddpc.cli.train", "feddpc.cli.sweep"}


@pytest.mark.parametrize("command", ["run", "sweep", "report"])
def test_the_help_of_a_command_needs_neither_torch_nor_rich(command):
    code = (
        f"import sys; sys.argv = ['feddpc', {command!r}, '--help']\nfrom feddpc.cli import main\n"
        "try:\n main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.splitlines()[-1].split()) & {"torch", "numpy", "rich"}


def test_no_line_of_the_help_is_cut():
    assert "..." not in invoke("--help").output.partition("Commands:")[2]
