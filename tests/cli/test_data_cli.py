import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from feddpc import data
from feddpc.cli.data import app
from feddpc.data.dataset import md5
from feddpc.data.specs import SPECS
from feddpc.errors import BadInputError, DataError

runner = CliRunner()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A private cache, and a CIFAR-10 of ten images per part in an .npz file."""
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "60")
    x, y = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8), np.arange(10)
    np.savez(tmp_path / "c.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    small = replace(SPECS["cifar10"], train=10, test=10, md5={"x_train": md5(x), "x_test": md5(x)})
    monkeypatch.setitem(SPECS, "cifar10", small)
    return tmp_path


def run(*words):
    return runner.invoke(app, words, catch_exceptions=True)


def test_get_then_list_then_check(here):
    got = run("get", "cifar10", "--from", str(here / "c.npz"))
    assert got.exit_code == 0, got.output
    assert "cifar10 is ready" in got.output
    assert "cifar10 is already here" in run("get", "cifar10").output
    states = {entry["name"]: entry for entry in json.loads(run("list", "--json").output)}
    assert list(states) == list(data.names())
    assert states["cifar10"]["state"] == "ready"
    assert states["cifar10"]["command"] is None
    assert states["cifar100"]["command"] == "feddpc data get cifar100"
    checked = run("check", "cifar10")
    assert checked.exit_code == 0
    assert f"x_train  md5 {SPECS['cifar10'].md5['x_train']}" in checked.output
    assert "cifar10: intact" in checked.output


def test_the_table_shows_state_and_command():
    lines = {line.split()[0]: line.split() for line in run("list").output.splitlines() if line.strip()}
    assert lines["digits"] == ["digits", "10", "8x8x1", "1438", "359", "embedded"]
    assert " ".join(lines["tiny-imagenet"][5:]) == "absent: feddpc data get tiny-imagenet"


def test_embedded_data_needs_no_getting():
    assert "nothing to get" in run("get", "digits").output
    assert run("check", "digits").exit_code == 0


def test_failures_reach_main_as_their_own_type(here):
    assert isinstance(run("check", "cifar100").exception, DataError)
    assert isinstance(run("get", "cifar11").exception, BadInputError)
    assert isinstance(run("get", "cifar10", "--from", str(here / "absent")).exception, DataError)
    run("get", "cifar10", "--from", str(here / "c.npz"))
    path = here / "cache" / "datasets" / "cifar10" / "x_test.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    failure = run("check", "cifar10").exception
    assert isinstance(failure, DataError)
    assert "--force" in str(failure)


def test_force_replaces_a_damaged_copy(here):
    run("get", "cifar10", "--from", str(here / "c.npz"))
    (here / "cache" / "datasets" / "cifar10" / "x_test.npy").unlink()
    assert isinstance(run("check", "cifar10").exception, DataError)
    assert run("get", "cifar10", "--force", "--from", str(here / "c.npz")).exit_code == 0
    assert run("check", "cifar10").exit_code == 0


def test_importing_the_commands_is_light():
    code = "import sys, feddpc.cli.data; print([m for m in ('torch', 'numpy', 'sklearn', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
