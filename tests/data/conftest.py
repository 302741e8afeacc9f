"""Small forgeries of the official files: twenty-image CIFARs, tiny Tiny ImageNets, so that real code paths run fast."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddpc.data.dataset import Dataset, md5
from feddpc.data.specs import SPECS, Archive, Spec

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A private cache folder."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FEDDPC_CACHE", str(root))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return root


@pytest.fixture
def small() -> Callable[[str], tuple[Spec, Dataset]]:
    """Return a function from a known name to a small random data set and the spec that it satisfies."""

    def make(name: str) -> tuple[Spec, Dataset]:
        real, rng = SPECS[name], np.random.default_rng(0)
        sizes = {"train": 5 * real.classes, "test": real.classes}
        arrays = {}
        for part, n in sizes.items():
            arrays[f"x_{part}"] = rng.integers(0, 256, (n, *real.shape), dtype=np.uint8)
            arrays[f"y_{part}"] = rng.permutation(np.arange(n) % real.classes)
        data = Dataset.from_arrays(**arrays, name=name, classes=real.classes, class_names=real.class_names)
        sums = {field: md5(arrays[field]) for field in ("x_train", "x_test")}
        blocks = tuple(md5(block) for block in np.split(arrays["x_train"], 5)) if real.blocks else ()
        return replace(real, **sizes, md5=sums, blocks=blocks, archives=(), hub=None, npm=None), data

    return make


@pytest.fixture
def register(monkeypatch) -> Callable[[Spec], Spec]:
    """Return a function that puts a spec in the table of known data sets for the length of a test."""

    def put(spec: Spec) -> Spec:
        monkeypatch.setitem(SPECS, spec.name, spec)
        return spec

    return put


def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1)


def _record(x: np.ndarray, y: np.ndarray, coarse: bool) -> bytes:
    head = [np.full((len(x), 1), 7, np.uint8)] if coarse else []
    return np.hstack([*head, y[:, None].astype(np.uint8), _rows(x)]).tobytes()


def png(array: np.ndarray, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array).save(out, form)
    return out.getvalue()


@pytest.fixture
def cifar_files() -> Callable[[Dataset, str], Files]:
    """Return a function that writes a data set as the files of an official CIFAR form."""

    def write(data: Dataset, form: str) -> Files:
        five = [
            (f"data_batch_{i + 1}", x, y)
            for i, (x, y) in enumerate(zip(np.split(data.x_train, 5), np.split(data.y_train, 5), strict=True))
        ]
        fine = data.classes == 100
        whole = [("train", data.x_train, data.y_train)] if fine else five
        parts = [*whole, ("test" if fine else "test_batch", data.x_test, data.y_test)]
        # Not the official order: neither does the official archive keep it.
        parts = parts[::-1]
        if form == "binary":
            records = {f"cifar-bin/{name}.bin": _record(x, y, fine) for name, x, y in parts}
            return records | {"cifar-bin/readme.html": b"hello"}
        sheets = {f"package/{name}.png": png(x.reshape(len(x), -1, 3)) for name, x, _ in parts}
        labels = {"train": data.y_train.tolist(), "test": data.y_test.tolist()}
        return sheets | {f"package/{part}_lables.json": json.dumps(y).encode() for part, y in labels.items()}

    return write


def to_tar(files: Mapping[str, bytes], path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def to_zip(files: Mapping[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def to_folder(files: Mapping[str, bytes], path: Path) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def write() -> Mapping[str, Callable[[Mapping[str, bytes], Path], Path]]:
    """Writers of the same files as a tar, a zip or a folder."""
    return {"tar": to_tar, "zip": to_zip, "folder": to_folder}


@pytest.fixture
def idx_files() -> Callable[..., Files]:
    """Return a function that writes a grey data set as IDX files, gzipped or plain."""

    def write(data: Dataset, zipped: bool = True) -> Files:
        files = {}
        for part, x, y in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
            for what, array in (("images-idx3", x[..., 0]), ("labels-idx1", y.astype(np.uint8))):
                content = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
                content += np.ascontiguousarray(array).tobytes()
                name = f"{part}-{what}-ubyte"
                files[name + ".gz" * zipped] = gzip.compress(content) if zipped else content
        return files

    return write


@pytest.fixture
def tiny_files() -> Callable[..., Files]:
    """Return a function that writes Tiny ImageNet's layout with ``classes`` classes, two images each; one is grey."""

    def write(classes: int = 200, side: int = 64) -> Files:
        wnids = [f"n{9000 - i:08d}" for i in range(classes)]  # wnids.txt is not sorted in the real one either
        files = {"t/wnids.txt": "\n".join(wnids).encode(), "t/words.txt": b"n0\tthing"}
        lines = []
        for i, wnid in enumerate(wnids):
            colour = np.full((side, side, 3), i, np.uint8)
            files[f"t/train/{wnid}/images/{wnid}_0.JPEG"] = png(colour[..., :1] if i == 0 else colour, "JPEG")
            files[f"t/train/{wnid}/images/{wnid}_1.JPEG"] = png(colour, "JPEG")
            files[f"t/train/{wnid}/{wnid}_boxes.txt"] = b"boxes"
            files[f"t/val/images/val_{i}.JPEG"] = png(colour, "JPEG")
            lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t1\t1\n")
        files["t/val/val_annotations.txt"] = "".join(lines).encode()
        return files

    return write


@pytest.fixture
def served_archive(tmp_path, small, cifar_files):
    """A small CIFAR-10 archive, its data and the Archive that describes it (address left to the test)."""
    spec, data = small("cifar10")
    path = to_tar(cifar_files(data, "binary"), tmp_path / "cifar-10-binary.tar.gz")
    content = path.read_bytes()
    return spec, data, content, Archive(path.name, hashlib.md5(content).hexdigest(), "")
