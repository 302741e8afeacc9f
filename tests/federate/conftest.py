"""What the tests of real federations share."""

import importlib.util
import os
import signal
import sys

import pytest

from feddpc.federate import app_template
from feddpc.federate.processes import marked


@pytest.fixture
def app(tmp_path):
    """The app that `feddpc federate init` writes."""
    app_template.write(tmp_path / "app")
    return tmp_path / "app"


@pytest.fixture
def simulated(app, monkeypatch):
    """The app's own simulation: a function from changed settings to a result."""
    monkeypatch.syspath_prepend(app)
    spec = importlib.util.spec_from_file_location("simulate", app / "simulate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.simulate
    for name in [name for name in sys.modules if name.partition(".")[0] == "federation"]:
        del sys.modules[name]


@pytest.fixture
def mark(tmp_path):
    """The folder of a federation, after which no process may be left."""
    yield tmp_path / "out"
    left = marked(str(tmp_path / "out"))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
