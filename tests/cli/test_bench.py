"""`feddpc bench`: a table, JSON, a file, and mistakes without a traceback."""

import json

import pytest
from typer.testing import CliRunner

from feddpc.bench import server_times, workloads
from feddpc.bench.workloads import Workload
from feddpc.cli import app
from feddpc.errors import BadInputError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    made = {n: Workload(n, f"{n} in small", "cnn", 10, 8, 20_000, test=1000) for n in ("cifar10", "tiny")}
    monkeypatch.setattr(workloads, "WORKLOADS", made)
    monkeypatch.setattr(server_times, "RESNET18", 20_000)


def bench(*args):
    return CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", *args])


def test_the_table_has_every_engine_the_eager_loop_and_the_server_step(tmp_path):
    out = tmp_path / "bench.json"
    done = bench("--against", "eager", "--rounds", "1", "--out", str(out))
    assert done.exit_code == 0, done.output
    for word in ("eager", "loop", "stacked", "speed 1 is eager, fedavg, float32", "FedDPC", "GB/s"):
        assert word in done.output
    found = json.loads(out.read_text())
    assert [w["workload"] for w in found["workloads"]] == ["cifar10"]
    assert {"torch", "date", "commit", "device", "threads"} <= found["machine"].keys()


def test_json_has_all_workloads_and_precisions_that_were_asked_for():
    done = bench("--json", "--workload", "all", "--rounds", "1", "--precision", "float64", "--methods", "fedavg,feddpc")
    found = json.loads(done.stdout)
    assert [w["workload"] for w in found["workloads"]] == ["cifar10", "tiny"]
    for workload in found["workloads"]:
        assert {r["precision"] for r in workload["rows"]} == {"float64"}
        assert {r["method"] for r in workload["rows"]} == {"fedavg", "feddpc"}


@pytest.mark.parametrize(
    "args",
    [
        ("--workload", "mnist"),
        ("--precision", "float8"),
        ("--against", "flower"),
        ("--methods", "fedfoo"),
        ("--device", "toaster"),
    ],
)
def test_mistakes_name_the_value(args):
    done = bench(*args)
    assert isinstance(done.exception, BadInputError)
    assert args[1] in str(done.exception)
