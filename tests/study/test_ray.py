"""A sweep on a real Ray cluster of two workers, of which one is killed."""

import gc
import socket

import pytest
import ray
from ray.cluster_utils import Cluster

from feddpc.errors import BadInputError
from feddpc.study import RayWorkers, choose, run_study, runner
from sweeping import numbers, records, specs

#: Ray leaves files open; they are collected in the fixture, where nobody minds.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

#: Bytes for what Ray keeps in memory, the least it takes.
LITTLE = 80 * 2**20
#: A method that waits in round 12 until a file is there, so that a worker can be killed while it works.
WAITING = """
import os, pathlib, time
from feddpc.methods import FedAvg

class Waiting(FedAvg):
    name = "waiting"

    def aggregate(self, w, server, up, cohort):
        gate, patience = os.environ.get("FEDDPC_TEST_GATE"), time.monotonic() + 120
        while cohort.round == 12 and gate and not pathlib.Path(gate).exists() and time.monotonic() < patience:
            time.sleep(0.02)
        return super().aggregate(w, server, up, cohort)
"""


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def cluster(monkeypatch, gate):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("FEDDPC_TEST_GATE", str(gate))  # workers have the environment of the moment they start
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": LITTLE, "include_dashboard": False},
    )
    made.workers = [made.add_node(num_cpus=1, object_store_memory=LITTLE) for _ in range(2)]
    monkeypatch.delenv("FEDDPC_TEST_GATE")
    yield made
    ray.shutdown()
    made.shutdown()
    gc.collect()


def test_a_killed_worker_does_not_change_the_table(tmp_path, cluster, gate, monkeypatch):
    (tmp_path / "waiting.py").write_text(WAITING)
    wanted = specs((f"{tmp_path / 'waiting.py'}:Waiting", "feddpc"), rounds=20)
    whole = run_study(wanted, tmp_path / "whole")
    killed, came_back = [], []
    plain = runner._StudyExecution._receive

    def watched(study, future, pool):
        came_back.append(future.exception())
        plain(study, future, pool)
        gate.touch()  # only now: a worker outlives its node by a moment, and could still have ended its run

    monkeypatch.setattr(runner._StudyExecution, "_receive", watched)

    def kill_one(progress):
        if progress.rounds == 22 and not killed:  # both workers are in round 12
            killed.append(progress)
            cluster.remove_node(cluster.workers[1], allow_graceful=False)

    workers = RayWorkers(cluster.address)
    outcomes = run_study(wanted, tmp_path / "ray", workers=workers, on_progress=kill_one, checkpoint_seconds=0.05)
    assert killed[0].ended == 0
    assert [isinstance(error, ray.exceptions.RayError) for error in came_back].count(True) == 1  # it was at work
    assert numbers(outcomes) == numbers(whole)
    assert records(tmp_path / "ray") == records(tmp_path / "whole")
    for by in ("validation", "test"):
        tables = [[(c.method, c.settings, c.score, c.test) for c in choose(o, by)] for o in (outcomes, whole)]
        assert tables[0] == tables[1]
    assert not (tmp_path / "ray" / "failed").exists()
    assert not (tmp_path / "ray" / "damaged").exists()
    assert not ray.is_initialized()
    with pytest.raises(BadInputError, match="a run needs 1 GPU, but the cluster has 0"):
        run_study(specs(rounds=5), tmp_path / "gpu", workers=RayWorkers(cluster.address, gpus=1.0))
    assert not ray.is_initialized()


def test_an_address_without_a_cluster_is_said_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "nonsense"):
        with pytest.raises(BadInputError, match="`ray start --head`"):
            run_study(specs()[:1], tmp_path, workers=RayWorkers(address))


@pytest.mark.parametrize("how", [{"cpus": -1.0}, {"gpus": float("inf")}, {"cpus": 0.0}])
def test_what_a_worker_needs(how):
    with pytest.raises(BadInputError, match=r"cpus|gpus"):
        RayWorkers(**how)
