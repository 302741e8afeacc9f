"""Real federations: processes, TLS, authenticated nodes. The simulator's numbers, also after kill -9 of anything."""

import os
import signal

import pytest
import torch

from deployments import kill_node, kill_superlink, restart_node, running, wait_until
from feddpc.federate import keys
from feddpc.federate.deployment import Deployment
from feddpc.federate.processes import ProcessError
from feddpc.runs.checkpoint import load_model
from feddpc.runs.record import read_records

pytestmark = pytest.mark.processes


def finish(run):
    for _ in run.wait():
        pass


def same(folder, result):
    there = load_model(folder / "model.safetensors")
    assert there.keys() == result.state_dict.keys()
    for name, value in result.state_dict.items():
        torch.testing.assert_close(there[name], value, rtol=0, atol=1e-6)
    records = read_records(folder / "rounds.jsonl")
    assert [r["participants"] for r in records] == [r["participants"] for r in result.records]
    assert [r["test_accuracy"] for r in records] == [r["test_accuracy"] for r in result.records]


def test_two_authenticated_nodes_over_tls_give_the_numbers_of_the_simulator(mark, app, simulated):
    wishes = {"clients": 2, "cohort": 2, "rounds": 2}
    with Deployment(mark, 2, tls=True) as deployment:
        deployment.start()
        finish(deployment.submit(app, {**wishes, "folder": str(mark / "run")}))
    same(mark / "run", simulated(clients=2, cohort=2, rounds=2))


@pytest.mark.slow
def test_a_loss_of_power_everywhere_and_a_restart_change_nothing(mark, app, simulated):
    # SCAFFOLD's clients remember, so their memories must be back too.
    wishes = {"clients": 2, "cohort": 2, "rounds": 2, "method": "scaffold"}
    wishes["folder"] = str(mark / "run")
    rounds = mark / "run" / "rounds.jsonl"
    with Deployment(mark, 2, tls=True) as deployment:
        deployment.start()
        deployment.submit(app, wishes)
        wait_until(lambda: len(read_records(rounds)) >= 1)
        for pid in running(mark, "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        kill_superlink(deployment)
        kill_node(deployment, 1)
        assert len(read_records(rounds)) < 2

        deployment.start_superlink()
        restart_node(deployment, 1)
        finish(deployment.submit(app, wishes))
    same(mark / "run", simulated(clients=2, cohort=2, rounds=2, method="scaffold"))


@pytest.mark.slow
def test_a_node_that_dies_costs_its_vote_and_not_the_round(mark, app):
    wishes = {"clients": 2, "cohort": 2, "rounds": 2, "folder": str(mark / "run")}
    rounds = mark / "run" / "rounds.jsonl"
    with Deployment(mark, 2, tls=False) as deployment:
        deployment.start()
        run = deployment.submit(app, wishes)
        wait_until(lambda: len(read_records(rounds)) >= 1)
        kill_node(deployment, 1)
        finish(run)
    first, second = read_records(rounds)
    assert first["participants"] == [0, 1]
    assert second["participants"] == [0]
    assert second["dropped"] + second["rejected"] == [1]
    assert all(torch.isfinite(value).all() for value in load_model(mark / "run" / "model.safetensors").values())


def test_strangers_do_not_get_in_and_nodes_do_not_talk_to_strangers(mark):
    with Deployment(mark, 2, tls=True) as deployment:
        deployment.start_superlink()
        deployment.register(range(2))
        other = keys.make(mark / "other", keys.LOOPBACK, 2)
        unknown = deployment.start_node(0, key=other.node(0))
        misled = deployment.start_node(1, ca=other.ca)
        wait_until(lambda: unknown.ended and misled.ended)
        with pytest.raises(ProcessError, match=r"SuperNode 0 ended with code .* does not know its key: register it"):
            deployment.check()
        assert "does not trust the server's certificate" in str(misled.failure())
        assert "CERTIFICATE_VERIFY_FAILED" in str(misled.failure())


def test_an_app_that_fails_is_told_with_its_reason(mark, app):
    with Deployment(mark, 1, tls=False) as deployment:
        deployment.start_superlink()
        with pytest.raises(ProcessError, match="is finished:failed") as error:
            finish(deployment.submit(app, {"method": "fedpdc", "folder": str(mark / "run")}))
        assert "unknown method 'fedpdc'" in str(error.value)
