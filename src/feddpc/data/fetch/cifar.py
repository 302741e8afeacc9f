"""CIFAR-10 and CIFAR-100 in their official binary version: one or two label bytes, then three planes of pixels."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.specs import Spec
from feddpc.errors import DataError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
#: Training files in official order, then the test file.
_BINARY = {
    "cifar10": (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    "cifar100": ("train.bin", "test.bin"),
}
_PICKLED = {"cifar10": {"data_batch_1", "test_batch"}, "cifar100": {"train", "test", "meta"}}


def decode(spec: Spec, path: Path) -> Dataset:
    """Read ``spec`` from its binary archive, or from the folder that it was extracted to; images in official order."""
    wanted = _BINARY[spec.name]
    # At most two levels: an extracted archive, or the folder that it was extracted in.
    names = [name for name in list_files(path) if name.count("/") <= 2]
    members = {name: base for name in names if (base := PurePosixPath(name).name) in wanted}
    if missing := [file for file in wanted if file not in members.values()]:
        if _PICKLED[spec.name] <= {PurePosixPath(name).name for name in names}:
            raise DataError(
                f"{path} is the Python version of {spec.name}, a pickle, which can run code and is not read: "
                f"get the binary version with `{spec.command}`, or from {' and '.join(a.url for a in spec.archives)}"
            )
        raise DataError(
            f"{path} is not {spec.name}: it lacks {', '.join(missing)}; give the official binary archive or its folder"
        )
    if len(members) != len(wanted):
        raise DataError(f"{path} holds the same file more than once: {', '.join(members)}; give the folder of one copy")
    parts = {members[name]: parse(spec, content, f"{path}/{name}") for name, content in read_files(path, members)}
    *train, (x_test, y_test) = (parts[file] for file in wanted)
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return spec.dataset(x_train, y_train, x_test, y_test)


def parse(spec: Spec, content: bytes, where: str) -> tuple[Array, Array]:
    """Return images and labels of one binary file; ``where`` names the file in messages."""
    # CIFAR-100 puts the coarse label before the fine one; the label is the byte next to the pixels.
    head = 2 if spec.name == "cifar100" else 1
    raw = np.frombuffer(content, np.uint8)
    if not raw.size or raw.size % (head + _PIXELS):
        raise DataError(
            f"{where} has {raw.size} bytes, not a multiple of {head + _PIXELS}: it is truncated; get it again"
        )
    records = raw.reshape(-1, head + _PIXELS)
    images = records[:, head:].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return images, records[:, head - 1].astype(np.int64)
