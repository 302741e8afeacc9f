"""What `feddpc federate init` writes: it is examples/flower, it runs, and it gives the simulator's numbers."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from feddpc.errors import BadInputError
from feddpc.federate import app_template

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"

#: Both halves of the app in one process, with its own configuration, against its own simulation.
BOTH = """
import json, sys, tomllib
from pathlib import Path
import torch
from flwr.app import Context, RecordDict
from feddpc.flower import InProcessGrid
from feddpc.runs.checkpoint import load_model
from federation import client_app, server_app
import simulate

config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
config |= {"rounds": 3, "folder": sys.argv[1], "method": sys.argv[2]}
grid = InProcessGrid(client_app.app, config["clients"], run_config=config)
server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
there = load_model(Path(sys.argv[1]) / "model.safetensors")
here = simulate.simulate(rounds=3, method=sys.argv[2]).state_dict
assert there.keys() == here.keys()
print(json.dumps({name: float((there[name] - here[name]).abs().max()) for name in here}))
"""


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def test_the_example_is_what_init_writes(tmp_path):
    app_template.write(tmp_path / "flower")
    assert contents(EXAMPLE) == contents(tmp_path / "flower")


def test_the_folder_gives_the_app_its_name(tmp_path):
    app_template.write(tmp_path / "My Study_2")
    project = tomllib.loads((tmp_path / "My Study_2" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-study-2"
    assert not any("$" in text for text in contents(tmp_path).values())


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInputError, match="not an empty folder: choose another one"):
        app_template.write(tmp_path)
    with pytest.raises(BadInputError, match="not an empty folder: choose another one"):
        app_template.write(tmp_path / "mine.txt")
    assert contents(tmp_path) == {"mine.txt": "mine"}


@pytest.mark.parametrize("method", ["feddpc", "scaffold"])
def test_the_app_gives_the_numbers_of_its_simulation(tmp_path, method):
    app = tmp_path / "app"
    app_template.write(app)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", BOTH, str(tmp_path / "run"), method]
    done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert set(differences.values()) == {0.0}
    hyper = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["hyper"]
    assert hyper.get("max_scale") == (10.0 if method == "feddpc" else None)
