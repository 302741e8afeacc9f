"""Tiny ImageNet in its official layout. Its test labels are unpublished, so the validation images are the test set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.fetch.images import stack
from feddpc.data.specs import Spec
from feddpc.errors import DataError

_CLASSES, _LABELS = "wnids.txt", "val/val_annotations.txt"


def decode(spec: Spec, path: Path) -> Dataset:
    """Read the official folder or zip; the number of a class is its position among the sorted WordNet ids."""
    names = list_files(path)
    # The folder of wnids.txt; the shallowest if there are several.
    root = min((n.removesuffix(_CLASSES) for n in names if f"/{n}".endswith(f"/{_CLASSES}")), key=len, default=None)
    if root is None:
        raise DataError(f"{path} is not Tiny ImageNet: it has no {_CLASSES}; give tiny-imagenet-200.zip or its folder")
    texts = {
        name: content.decode(errors="replace") for name, content in read_files(path, [root + _CLASSES, root + _LABELS])
    }
    if root + _LABELS not in texts:
        raise DataError(f"{path} lacks {root}{_LABELS}: the copy is incomplete; get it again")
    classes = sorted(set(texts[root + _CLASSES].split()))
    if len(classes) != spec.classes:
        raise DataError(f"{path}: {_CLASSES} lists {len(classes)} classes, but Tiny ImageNet has {spec.classes}")
    index = {wnid: i for i, wnid in enumerate(classes)}
    images = {
        part: [n for n in names if n.startswith(f"{root}{part}/") and n.endswith(".JPEG")] for part in ("train", "val")
    }
    labels = {name: name.removeprefix(f"{root}train/").split("/")[0] for name in images["train"]}
    if differing := set(labels.values()) ^ set(classes):
        raise DataError(f"{path}: {_CLASSES} and train/ disagree on {len(differing)} classes, such as {min(differing)}")
    for line in texts[root + _LABELS].splitlines():
        file, wnid, *_ = [*line.split("\t"), ""]
        labels[f"{root}val/images/{file}"] = wnid
    known = {*images["train"], *images["val"]}
    wrong = [name for name in known | labels.keys() if name not in known or labels.get(name) not in index]
    if wrong:
        raise DataError(f"{path}: {_LABELS} and val/images/ disagree on {min(wrong)}: get a complete copy")
    y_train, y_val = (np.asarray([index[labels[name]] for name in images[part]]) for part in ("train", "val"))
    x_train = stack(path, images["train"], mode="RGB", text="reading training images")
    x_val = stack(path, images["val"], mode="RGB", text="reading validation images")
    return replace(spec, class_names=tuple(classes)).dataset(x_train, y_train, x_val, y_val)
