"""Help texts and messages for mistyped commands and flags."""

import re

import pytest
import typer
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.config import keys, per_run_keys


def commands(command, path=()):
    """Return the words of every command and group."""
    found = [path]
    for name, below in getattr(command, "commands", {}).items():
        found += commands(below, (*path, name))
    return found


def invoke(*args):
    return CliRunner().invoke(app, list(args))


ALL = commands(typer.main.get_command(app))


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
    parameters = typer.main.get_command(app).commands[command].params
    shown = {flag for parameter in parameters for flag in parameter.opts}
    left_out = () if command == "run" else per_run_keys()
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
