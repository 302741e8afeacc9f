"""A federation behind nginx, with the configuration of deploy/: nodes get through, and nothing else does."""

import http.client
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from deployments import wait_until
from feddpc.federate import app_template, connections
from feddpc.federate.deployment import Deployment
from feddpc.runs.record import read_records

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
pytestmark = [pytest.mark.processes, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


def configure(folder: Path, keys: Path, proxy: int, link: int) -> Path:
    """Write deploy/nginx.conf for other ports and folders, and otherwise as it is."""
    text = CONFIGURATION.read_text()
    for old, new in {"/etc/feddpc/keys": keys, "listen 8443": f"listen 127.0.0.1:{proxy}", ":8444": f":{link}"}.items():
        assert old in text
        text = text.replace(old, str(new))
    own = "".join(f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    if os.geteuid() == 0:
        text = f"user root;\n{text}"  # else its processes could not write into folders of the tests
    path = folder / "nginx.conf"
    path.write_text(text.replace("/run/nginx.pid", str(folder / "pid")).replace("http {", "http { " + own))
    return path


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A deployment of two nodes that reach the SuperLink through nginx only."""
    folder = tmp_path_factory.mktemp("proxy")
    with Deployment(folder / "federation", 2, tls=True) as deployment:
        deployment.start_superlink()
        deployment.register(range(2))
        (port,) = connections.free_ports(1)
        path = configure(folder, deployment.keys.folder, port, deployment.port)
        command = [NGINX, "-p", str(folder), "-c", str(path)]
        assert subprocess.run([*command, "-t"], check=False, capture_output=True).returncode == 0
        proxy = subprocess.Popen([*command, "-g", "daemon off;"])
        try:
            wait_until(lambda: connections.is_listening(port))
            deployment.port = port  # for the nodes
            for number in range(2):
                deployment.start_node(number)
            yield deployment
        finally:
            proxy.terminate()
            proxy.wait()


def connect(deployment):
    context = ssl.create_default_context(cafile=str(deployment.keys.ca))
    return http.client.HTTPSConnection("127.0.0.1", deployment.port, context=context, timeout=60)


def post(deployment, path, body=b""):
    """Return the status with which the proxy answers."""
    connection = connect(deployment)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/protobuf"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_federation_trains_through_the_proxy(behind, tmp_path):
    app_template.write(tmp_path / "app")
    config = {"clients": 2, "cohort": 2, "rounds": 1, "folder": str(tmp_path / "run")}
    for _ in behind.submit(tmp_path / "app", config).wait():
        pass
    assert [record["participants"] for record in read_records(tmp_path / "run" / "rounds.jsonl")] == [[0, 1]]


@pytest.mark.parametrize("path", ["/", "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/../control/x"])
def test_only_what_nodes_use_is_passed_on(behind, path):
    assert post(behind, path) == 403


def test_a_message_beyond_the_limit_is_refused(behind):
    assert post(behind, "/v1/fleet/push-object", bytes(9 * 2**20)) == 413
    assert post(behind, "/v1/fleet/pull-messages") == 401  # this one the SuperLink sees, and asks for a key


def test_one_address_cannot_take_all_connections(behind):
    held = []
    try:
        for _ in range(64):
            connection = connect(behind)
            connection.putrequest("POST", "/v1/fleet/pull-messages")
            connection.putheader("Content-Length", "10")  # which never come
            connection.endheaders()
            held.append(connection)
        wait_until(lambda: post(behind, "/v1/fleet/pull-messages") == 503)
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: post(behind, "/v1/fleet/pull-messages") == 401)
