"""Every reader has a target, and what was ever found stays found. Exploring further is `make fuzz`."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "feddpc"

#: What the library reads that others may have written, and the targets for it.
READERS = {
    "IDX": ["idx_file"],
    "CIFAR binary and labels": ["cifar_binary", "cifar_labels"],
    "npz": ["npz_file"],
    "LEAF, tables and plays": ["leaf_json", "csv_table", "play_text"],
    "Tiny ImageNet": ["tiny_imagenet_zip"],
    "images, folders and zips of them": ["image", "image_zip"],
    "zip and tar": ["archive"],
    "the data cache": ["cached"],
    "TOML": ["config_toml", "sweep_toml", "set_flag"],
    "JSONL": ["rounds_jsonl"],
    "JSON": ["run_json", "compare_json", "reproduce_records", "tuned_settings"],
    "safetensors": ["model_file", "checkpoint_state", "client_memory"],
    "checkpoint notes": ["checkpoint_note"],
    "keys and certificates": ["pem"],
    "Flower records, at the server": [
        *("flower_reply", "flower_evaluation", "flower_plain_reply", "flower_answer", "secure_reply")
    ],
    "Flower records, at a client": ["flower_order", "secure_order"],
}

#: Modules that parse something, and the targets that go through them; none: it reads what this library's own process
#: or the system wrote a moment ago.
PARSERS = {
    "data/fetch/archive.py": ["archive"],
    "data/fetch/cache.py": ["cached"],
    "data/fetch/cifar.py": ["cifar_binary"],
    "data/fetch/idx.py": ["idx_file"],
    "data/fetch/images.py": ["image", "image_zip"],
    "data/fetch/npm_cifar10.py": ["cifar_labels"],
    "data/readers.py": ["leaf_json", "csv_table"],
    "data/untrusted.py": ["npz_file"],
    "federate/deployment.py": [],
    "federate/findings.py": [],
    "federate/flower_cli.py": [],
    "federate/link_checks.py": [],
    "federate/node_keys.py": [],
    "federate/keys.py": ["pem"],
    "flower/messages.py": [
        *("flower_reply", "flower_evaluation", "flower_plain_reply", "flower_answer", "flower_order", "secure_order")
    ],
    "flower/secure/protocol.py": ["secure_reply"],
    "flower/run_log.py": [],
    "report/tables.py": ["run_json"],
    "paper/documents.py": [],
    "paper/records.py": ["reproduce_records"],
    "runs/checkpoint.py": ["model_file", "checkpoint_state", "checkpoint_note"],
    "config/toml.py": ["config_toml", "set_flag"],
    "flower/prometheus.py": [],
    "runs/record.py": ["rounds_jsonl", "run_json"],
    "runs/runner.py": [],
    "study/plan.py": ["compare_json", "sweep_toml"],
    "study/space.py": ["sweep_toml"],
    "bench/workloads.py": [],
    # What a command of this library tells the ranks that it starts.
    "bench/rank_rounds.py": [],
    "study/rank_runs.py": [],
}
PARSING = {
    *("json.loads", "json.load", "tomllib.loads", "tomllib.load", "np.load", "np.frombuffer", "Image.open"),
    *("zipfile.ZipFile", "tarfile.open", "gzip.GzipFile", "safe_open", "load_file", "pickle.Unpickler"),
    *("x509.load_pem_x509_certificate", "load_pem_private_key", "bytes_to_public_key"),
}


def _script(name, *options, **more):
    """Run one of the scripts here with the library of this tree."""
    place = {"PYTHONPATH": str(SOURCE.parent), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE / name), *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **place}, **more)


@pytest.fixture(scope="module")
def replayed():
    done = _script("replay.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_whole_corpus_is_read_or_refused(replayed):
    others = {(name, file): said for name, all in replayed.items() for file, said in all.items()}
    assert {key: said for key, said in others.items() if said not in ("read", "refused")} == {}


def test_fuzzing_starts_from_what_is_valid(replayed):
    """A seed that is refused at the door leads nowhere. The cached data set is too small to be CIFAR-10."""
    seeds = {n: [said for file, said in all.items() if file.startswith("seed-")] for n, all in replayed.items()}
    assert all(seeds.values())
    assert [name for name, said in seeds.items() if set(said) != {"read"}] == ["cached"]


def test_every_reader_has_a_target(replayed):
    assert sorted(name for names in READERS.values() for name in names) == sorted(replayed)
    assert sorted(replayed) == sorted(path.name for path in (HERE / "corpus").iterdir())


def test_every_module_that_parses_is_known():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if _calls(path) & PARSING}
    assert found == PARSERS.keys()


def test_parsers_have_targets(replayed):
    assert {name for names in PARSERS.values() for name in names} <= replayed.keys()


def _calls(path):
    """Return the names of what a module calls or derives from, as they are written."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return {ast.unparse(node) for node in [*called, *bases]}


ESCAPES = {
    "os.system('true')": "os.system",
    "__import__('subprocess').run(['true'])": "subprocess.Popen",
    "open('/etc/hostname').read()": "open",
    "open(str(Path.home() / 'x'), 'w')": "open",
    "os.remove('/nowhere')": "os.remove",
    "os.symlink('/etc', '/nowhere')": "os.symlink",
    "__import__('socket').create_connection(('127.0.0.1', 9))": "socket.connect",
    "bytearray(8 << 30)": "MemoryError",
}


@pytest.mark.parametrize("attempt", ESCAPES)
def test_the_guard_notices(attempt, tmp_path):
    """A target that does what no reader may is found out, also when it takes all errors for damage."""
    code = (
        "import os, sys, pathlib\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(HERE.parent)!r})\n"
        "from fuzz.guard import Guard, limit_memory\n"
        f"import subprocess, socket\nguard = Guard(Path({str(tmp_path)!r}))\nlimit_memory()\nguard.armed = True\n"
        f"open({str(tmp_path / 'inside')!r}, 'w').close()\n"
        f"try:\n    {attempt}\nexcept MemoryError: raise\nexcept Exception: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert ESCAPES[attempt] in done.stderr.splitlines()[-1]


def test_exploring_finds_what_is_there_and_keeps_it(tmp_path):
    """The machinery itself: a reader that fails on tables of rank 2, which no seed has, is found out."""
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport everything\n"
        "from feddpc.errors import FeddpcError\nreaders = everything.targets.TARGETS\nread = readers['idx_file']\n"
        "def faulty(content):\n"
        "    try: read(content)\n"
        "    except FeddpcError: pass\n"
        "    if content[2:4] == bytes([8, 2]): raise ValueError('a fault')\n"
        "readers['idx_file'] = faulty\n"
        f"sys.argv = ['x', '--runs', '20000', '--only', 'idx_file', '--place', {str(tmp_path / 'found')!r}]\n"
        "everything.main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "FEDDPC_REPORTS": str(tmp_path / "reports")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "ValueError: a fault" in done.stdout
    (kept,) = (tmp_path / "found").glob("crash-idx_file-*")
    assert kept.read_bytes()[2:4] == bytes([8, 2])
    report = json.loads((tmp_path / "reports" / "fuzz.json").read_text())
    assert report["findings"] == 1
    assert 0 < report["inputs"] < 20000
