"""``flwr run`` with Flower's own simulation gives the model of ``feddpc.simulate``. Needs flwr[simulation]."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import feddpc
from feddpc.runs.checkpoint import load_model

EXPERIMENT = {"data": "digits", "model": "mlp", "clients": 4, "cohort": 2, "batch_size": 64, "seed": 3}
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "trial"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "trial"

[tool.flwr.app.components]
serverapp = "trial.app:server"
clientapp = "trial.app:client"

[tool.flwr.app.config]
rounds = 3
folder = ""
"""
APP = f"""
from feddpc import flower
from feddpc.config import Config
from feddpc.build import build

halves = flower.app_arguments(build(Config.read({EXPERIMENT!r})))
server = flower.server_app("scaffold", **halves.server())
client = flower.client_app(**halves.client())
"""


def stop(home: Path) -> None:
    """End the SuperLink that ``flwr run`` started for this home and left behind, and what that one started."""
    for folder in Path("/proc").iterdir():
        try:
            mine = folder.name.isdigit() and f"FLWR_HOME={home}" in (folder / "environ").read_text(errors="replace")
        except OSError:  # it has ended, or is not ours
            continue
        if mine:
            os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.processes
def test_flowers_simulation_gives_the_simulators_model(tmp_path):
    """SCAFFOLD, so that the clients' memory between rounds, which lives in processes of Ray, matters."""
    app, flwr = tmp_path / "trial", Path(sys.executable).with_name("flwr")
    (app / "trial").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "trial" / "__init__.py").write_text("")
    (app / "trial" / "app.py").write_text(APP)
    home = tmp_path / "home"
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(feddpc.__file__).parents[1]),
        "PATH": f"{flwr.parent}{os.pathsep}{os.environ['PATH']}",
    }
    out = tmp_path / "run"
    command = [flwr, "run", app, "--stream", "-c", f"folder='{out}'"]
    command += ["--federation-config", "num-supernodes=4 client-resources-num-cpus=1"]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    finally:
        stop(home)
    assert (out / "summary.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    expected = feddpc.simulate(**EXPERIMENT, method="scaffold", rounds=3, engine="loop").state_dict
    found = load_model(out / "model.safetensors")
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-6
