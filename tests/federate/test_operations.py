"""Operating a real SuperLink: registering, checking, revoking, rotating, supervising; real processes."""

import os
import signal
import subprocess
import sys

import pytest

from deployments import wait_until
from feddpc.errors import BadInputError
from feddpc.federate import findings, rotation
from feddpc.federate.deployment import CONNECTION, Deployment
from feddpc.federate.flower_cli import FlowerCli
from feddpc.federate.link_checks import check_link, check_nodes
from feddpc.federate.node_keys import NodeKeys
from feddpc.federate.processes import ProcessError, marked
from feddpc.federate.supervise import Supervisor
from feddpc.runs.record import read_records

pytestmark = pytest.mark.processes


def cli_of(deployment):
    return FlowerCli(CONNECTION, environment={"FLWR_HOME": str(deployment.folder / "server" / "flwr")})


def test_keys_are_registered_checked_revoked_and_the_authority_is_replaced(mark):
    with Deployment(mark, 2, tls=True) as deployment:
        deployment.start_superlink()
        link, made = cli_of(deployment), deployment.keys

        def key_of(number, ca=None):
            found = check_link(deployment.address, ca or made.ca, made.node(number))
            assert found[-2].level == findings.Level.ok, found  # Flower, after the clock
            return found[-1]

        assert "not registered" in key_of(0).value
        NodeKeys(made.folder).register(link)
        assert key_of(0).value == key_of(1).value == "registered at the SuperLink"
        assert findings.worst(check_nodes(made.folder, link)) == findings.Level.ok

        # The authority is replaced: the link restarts with the new certificate, nodes have both authorities.
        rotation.begin_authority(made)
        rotation.rotate_server(made)
        deployment.superlink.kill()
        deployment.start_superlink()
        assert key_of(0).level == findings.Level.ok
        rotation.finish_authority(made)
        process = deployment.start_node(1)
        wait_until(lambda: "SuperNode ID" in process.text() or process.ended)
        assert not process.ended

        # A revoked node is out, also when it starts again.
        private = made.node(1).read_bytes()
        NodeKeys(made.folder).revoke(link, "node-1")
        made.node(1).write_bytes(private)
        assert "revoked" in key_of(1).value
        process.kill()  # it holds the node's port
        stranger = deployment.start_node(1)
        wait_until(lambda: stranger.ended)
        assert "Failed to activate SuperNode" in stranger.text()


def test_a_failing_run_is_submitted_again_until_it_completes(mark, app):
    lines = []
    with Deployment(mark, 2, tls=False) as deployment:
        deployment.start()
        config = [f'clients=2 cohort=2 rounds=1 folder="{mark / "run"}"']
        more = {"link": cli_of(deployment), "tell": lines.append, "wait": 0.1, "poll": 0.2}
        with pytest.raises(ProcessError, match=r"2 failures in a row.*unknown method 'fedpdc'"):
            Supervisor(app, CONNECTION, config=[*config, 'method="fedpdc"'], failures=2, **more).run()
        Supervisor(app, CONNECTION, config=config, run_folder=mark / "run", **more).run()
    assert len(read_records(mark / "run" / "rounds.jsonl")) == 1
    assert "completed, 1 rounds done" in lines[-1]


def test_a_superlink_that_lost_its_database_gets_the_keys_again(mark):
    with Deployment(mark, 2, tls=True) as deployment:
        deployment.start_superlink()
        link, folder = cli_of(deployment), deployment.keys.folder
        before = [entry.node_id for entry in NodeKeys(folder).register(link)]
        with pytest.raises(BadInputError, match="nothing was changed"):
            NodeKeys(folder).revoke(link, "node-0", "12345")
        deployment.superlink.kill()
        for path in (deployment.folder / "server").glob("*.db*"):
            path.unlink()
        deployment.start_superlink()
        assert findings.worst(check_nodes(folder, link)) == findings.Level.error
        assert before != [entry.node_id for entry in NodeKeys(folder).register(link)]
        assert findings.worst(check_nodes(folder, link)) == findings.Level.ok
        assert (
            check_link(deployment.address, deployment.keys.ca, deployment.keys.node(0))[-1].level == findings.Level.ok
        )


def test_a_run_that_somebody_stops_is_over(mark, app, tmp_path):
    lines = []
    with Deployment(mark, 1, tls=False) as deployment:
        deployment.start_superlink()  # without nodes the run waits
        link = cli_of(deployment)
        config = [f'clients=2 cohort=2 rounds=1 folder="{mark / "run"}"']

        def tell(line):
            lines.append(line)
            if "submitted" in line:
                link.stop_run(line.split()[1].rstrip(":"))

        Supervisor(app, CONNECTION, config=config, state=tmp_path / "state", link=link, tell=tell, poll=0.2).run()
    assert [line.split(": ", 1)[1].split(",")[0].split(";")[0] for line in lines] == ["submitted", "was stopped"]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_supervisor_that_is_interrupted_stops_its_run_and_leaves_no_process(mark, app, how, tmp_path):
    with Deployment(mark, 1, tls=False) as deployment:
        deployment.start_superlink()  # without nodes the run waits
        home = str(deployment.folder / "server" / "flwr")
        environment = {**os.environ, "FLWR_HOME": home, "FEDDPC_FEDERATION": str(tmp_path / "supervised")}
        command = [sys.executable, "-m", "feddpc", "federate", "supervise", str(app), CONNECTION]
        command += ["-c", f'folder="{mark / "run"}"', "--poll", "0.2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)
        try:
            line = process.stdout.readline()
            assert "submitted" in line, process.stderr.read()
            process.send_signal(how)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, err) == (130, "")
        assert "stopped" in out
        assert marked(str(tmp_path / "supervised")) == []
        run = line.split()[1].rstrip(":")
        assert cli_of(deployment).status(run) == "finished:stopped"
