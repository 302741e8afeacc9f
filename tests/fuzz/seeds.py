"""Small valid files and messages, from which fuzzing starts: ``python tests/fuzz/seeds.py`` writes the corpus."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from PIL import Image
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).parents[1]))
from feddpc.config import EXECUTION_KEYS, Config
from feddpc.data.dataset import FIELDS
from feddpc.data.fetch import cache as data_cache
from feddpc.federate import certificates
from fuzz import files, heard

CORPUS = Path(__file__).parent / "corpus"


def _picture(kind: str = "PNG", mode: str = "RGB", side: int = 4) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (side, side), bytes(range(48))[: 3 * side * side]).convert(mode).save(out, kind)
    return out.getvalue()


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _npz() -> bytes:
    out = io.BytesIO()
    x, y = np.zeros((2, 2), np.float32), np.array([0, 1])
    np.savez(out, x_train=x, y_train=y, x_test=x, y_test=y)
    return out.getvalue()


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(3, np.uint8))
    return out.getvalue()


def _tiny() -> bytes:
    picture = _picture("JPEG")
    files = {"t/wnids.txt": b"a\nb\n", "t/val/val_annotations.txt": b"v.JPEG\ta\t0\n", "t/val/images/v.JPEG": picture}
    return _zip(files | {f"t/train/{c}/images/{c}.JPEG": picture for c in "ab"})


def _pem() -> list[bytes]:
    key = certificates.new_key()
    signer = certificates.authority(key)
    made = certificates.server(key, ["localhost", "127.0.0.1"], dt.timedelta(days=9), signer, key)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return [made.public_bytes(Encoding.PEM), signer.public_bytes(Encoding.PEM), private]


def _line(number: int) -> str:
    values = {"round": number, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": None, "seconds": 0.1}
    return json.dumps(values | {"participants": [1, 2], "dropped": [], "rejected": []}) + "\n"


def seeds() -> dict[str, list[bytes]]:
    """Return valid files by target."""
    note = {"format": data_cache.FORMAT, "class_names": None, "md5": dict.fromkeys(FIELDS, "")}
    about = {"round": 1, "record_bytes": 0, "record_sha256": None, "file": files.STATE, "diverged": None}
    about |= {"meter": {"d": 3}, "sha256": hashlib.sha256(files.state()).hexdigest()}
    row = {"part": "table2", "alpha": 0.2, "name": "a", "label": "A", "seeds": [0], "config": {}, "runs": {"0": 0}}
    run = {"rounds": 1, "seconds": 0.1, "correct": "AwA=", "train_loss": [0.5]}
    execution = {key: getattr(Config, key) for key in EXECUTION_KEYS}
    study = {
        "data": "digits",
        "scale": "small",
        "short": "",
        "origin": {},
        "usual_run": {"status": "finished", **execution},
    }
    study["usual"] = {"method": "fedavg", "rounds": 1, "hyper": {}}
    chosen = {"validation": {"lr": 0.1, "hyper": {"lam": 1.0}}}
    pictures = {f"{part}/{name}/0.png": _picture() for part in ("train", "test") for name in ("cat", "dog")}
    return {
        "idx_file": [b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + bytes(8), b"\0\0\x08\x01\0\0\0\x02ab"],
        "cifar_binary": [bytes(3074)],
        "cifar_labels": [b"[1, 2, 3]"],
        "image": [_picture(), _picture("JPEG"), _picture(mode="P"), _picture(mode="L")],
        "image_zip": [_zip(pictures)],
        "tiny_imagenet_zip": [_tiny()],
        "archive": [_zip({"a/b": b"c"}), _tar({"a/b": b"c", "x" * 120: b"d"})],
        "npz_file": [_npz()],
        "leaf_json": [
            b'{"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [[0.5], [1.0]], "y": [0, 1]}}}',
            b'{"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": ["abc"], "y": ["d"]}}}',
        ],
        "csv_table": [b"a,y\n1,0\n2.5,1\n", b"a,b,y\n1,2,cat\n3,4,dog\n"],
        "play_text": [b"ANN:\n" + b"Hello, hello!\n" * 80],
        "cached": [json.dumps(note).encode() + b"\0" + _npy()],
        "config_toml": [
            b'method = "feddpc"\nrounds = 5\nlr = 0.1\n[hyper]\nlam = 1.0\n[model_options]\nhidden = [8]\n',
            b'rule = "krum"\n[rule_options]\nmost = 2\n[faults]\nsign_flip = 0.2\noften = 0.5\n[screen]\ntimes = 3.0\n',
        ],
        "set_flag": [b"lam=0.5", b"hidden=[8, 16]"],
        "rounds_jsonl": [(_line(1) + _line(2)).encode(), (_line(1) + '{"rou').encode()],
        "run_json": [b'{"status": "finished", "rounds": 1, "reason": null, "costs": {}}'],
        "compare_json": [
            b'{"runs": [], "methods": ["fedavg"], "seeds": [0], "set": ["model.groups=2"], "config": {"lr": 0.1}}'
        ],
        "model_file": [save({"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2)})],
        "checkpoint_state": [files.state()],
        "checkpoint_note": [
            files.signed(json.dumps(about).encode()),
        ],
        "sweep_toml": [b'methods = ["fedavg"]\nseeds = [0]\ngrid = ["lr=0.1, 0.3"]\nset = []\n[config]\nrounds = 3\n'],
        "reproduce_records": [json.dumps({**study, "rows": [row], "runs": [run]}).encode()],
        "tuned_settings": [json.dumps({"source": "x", "settings": {"0.2": {"FedDPC": chosen}}}).encode()],
        "client_memory": [save({"1.c": torch.zeros(7)}), save({"1.c": torch.zeros(7), "2.c": torch.ones(7)})],
        "pem": _pem(),
    } | heard.seeds()


def main() -> None:
    for name, contents in seeds().items():
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(contents):
            (CORPUS / name / f"seed-{number}").write_bytes(content)


if __name__ == "__main__":
    main()
