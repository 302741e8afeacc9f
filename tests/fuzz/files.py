"""Every reader of files that may come from elsewhere, as a function of the file's bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from feddpc import methods
from feddpc.config import Config, parse_set, read_toml
from feddpc.data import readers
from feddpc.data.fetch import cache as data_cache
from feddpc.data.fetch import cifar, idx, images, npm_cifar10, shakespeare, tiny_imagenet
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.specs import SPECS
from feddpc.data.untrusted import read_npz
from feddpc.errors import FeddpcError
from feddpc.federate import keys
from feddpc.paper import records, tuned
from feddpc.report import tables
from feddpc.round.state import RunState
from feddpc.runs import checkpoint, stored
from feddpc.study import plan
from fuzz.place import FOLDER, file, target

STATE = "round-0000001.safetensors"
TINY = replace(SPECS["tiny-imagenet"], classes=2)


@target
def idx_file(content: bytes) -> None:
    idx.parse(content, "file")


@target
def cifar_binary(content: bytes) -> None:
    cifar.parse(SPECS["cifar100"], content, "file")


@target
def cifar_labels(content: bytes) -> None:
    npm_cifar10.parse_labels(content, "file")


@target
def image(content: bytes) -> None:
    images.pixels(content, "file", "RGB")


@target
def image_zip(content: bytes) -> None:
    images.decode(file("images.zip", content))


@target
def tiny_imagenet_zip(content: bytes) -> None:
    tiny_imagenet.decode(TINY, file("tiny.zip", content))


@target
def archive(content: bytes) -> None:
    path = file("archive", content)
    for _ in read_files(path, list_files(path)):
        pass


@target
def npz_file(content: bytes) -> None:
    read_npz(file("data.npz", content))


@target
def leaf_json(content: bytes) -> None:
    """A file of LEAF in the place of both parts."""
    for part in ("train", "test"):
        (FOLDER / "leaf" / part).mkdir(parents=True, exist_ok=True)
        file("all.json", content, FOLDER / "leaf" / part)
    readers.read_leaf(FOLDER / "leaf")


@target
def csv_table(content: bytes) -> None:
    readers.read_table(file("table.csv", content), target="y", test=0.5)


@target
def play_text(content: bytes) -> None:
    shakespeare.decode(replace(SPECS["shakespeare"], classes=len(set(content))), file("play.txt", content))


@target
def cached(content: bytes) -> None:
    """What lies in the cache: the note, and an array in the place of all."""
    note, _, array = content.partition(b"\0")
    place = FOLDER / "datasets" / "cifar10"
    place.mkdir(parents=True, exist_ok=True)
    file("dataset.json", note, place)
    for field in ("x_train", "y_train", "x_test", "y_test"):
        file(f"{field}.npy", array, place)
    data_cache.read(SPECS["cifar10"], FOLDER)


@target
def config_toml(content: bytes) -> None:
    Config.read(read_toml(file("config.toml", content, FOLDER / "config")))


@target
def set_flag(content: bytes) -> None:
    parse_set(content.decode("utf-8", "replace"))


def _run_folder() -> Path:
    folder = FOLDER / "run"
    if not folder.exists():
        file("config.toml", b'method = "fedavg"\nrounds = 3\n', folder)
        file("rounds.jsonl", b"", folder)
    return folder


@target
def rounds_jsonl(content: bytes) -> None:
    """A run's records: read strictly, and as far as they make sense, up to the table that shows them."""
    folder = _run_folder()
    file("rounds.jsonl", content, folder)
    tables.rows(tables.collect(folder, []))
    stored.load(folder)


@target
def run_json(content: bytes) -> None:
    """The notes beside the records."""
    folder = _run_folder()
    line = b'{"round": 1, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0, "seconds": 0.1}\n'
    file("rounds.jsonl", line, folder)
    for name in ("summary", "environment", "privacy", "holdings"):
        file(f"{name}.json", content, folder)
    try:
        tables.rows(tables.collect(folder, []))
        stored.load(folder)
    finally:
        for name in ("summary", "environment", "privacy", "holdings"):
            (folder / f"{name}.json").unlink()


@target
def compare_json(content: bytes) -> None:
    plan.stored_plan(file("compare.json", content, FOLDER / "compare").parent, "comparison")


@target
def model_file(content: bytes) -> None:
    checkpoint.load_model(file("model.safetensors", content))


@cache
def state() -> bytes:
    """Return the state of a run of SCAFFOLD with four clients, of which two took part."""
    vectors = {"w": torch.zeros(3), "server.c": torch.zeros(3), "clients.c": torch.zeros(2, 3)}
    return save(vectors | {"slots/ids": torch.zeros(0, dtype=torch.int64), "clients/ids": torch.tensor([1, 3])})


def signed(content: bytes) -> bytes:
    """Return the note of a checkpoint with today's format and its checksum, where it is a table."""
    try:
        note = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(note, dict):
        return content
    note["format"] = checkpoint.FORMAT
    return json.dumps(note | {"note_sha256": checkpoint._note_digest(note)}).encode()


@target
def checkpoint_state(content: bytes) -> None:
    """A checkpoint whose checksums fit, whatever it holds: up to the run that would go on from it."""
    folder = FOLDER / "checkpoint"
    file(STATE, content, folder)
    note = {"round": 1, "record_bytes": 0, "record_sha256": None, "diverged": None, "meter": {}}
    note |= {"file": STATE, "sha256": hashlib.sha256(content).hexdigest()}
    file("checkpoint.json", signed(json.dumps(note).encode()), folder)
    saved = checkpoint.load(folder)
    assert saved is not None
    checkpoint.restore(saved, RunState.begin(methods.create("scaffold"), torch.zeros(3), 4))


@target
def checkpoint_note(content: bytes) -> None:
    """The note that names a checkpoint, next to a file that it may name; its own checksum fits."""
    file(STATE, state(), FOLDER / "note")
    checkpoint.load(file("checkpoint.json", signed(content), FOLDER / "note").parent)


@target
def sweep_toml(content: bytes) -> None:
    plan.stored_plan(file("sweep.toml", content, FOLDER / "sweep").parent, "sweep")


@target
def reproduce_records(content: bytes) -> None:
    records.read(file("records.json", content))


@target
def tuned_settings(content: bytes) -> None:
    tuned.Tuned.read(file("tuned.json", content))


@target
def pem(content: bytes) -> None:
    """A certificate or private key of a federation; it is read as both."""
    path = file("node.pem", content)
    with contextlib.suppress(FeddpcError):
        return keys.read_key(path)
    found = keys.read_certificate(path)
    keys.names_of(found), keys.out_of_date(found), keys._public(found)
