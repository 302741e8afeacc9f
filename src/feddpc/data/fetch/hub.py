"""Known data sets from the Hugging Face hub, with the library ``datasets`` (extra ``hub``)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset, md5
from feddpc.data.fetch.download import TIMEOUT, progress_bar
from feddpc.data.specs import Hub, Spec
from feddpc.errors import DataError


def fetch(spec: Spec) -> Dataset:
    """Download ``spec`` from the hub and decode it, with images and classes in our order."""
    hub = spec.hub
    if hub is None:
        raise DataError("it is not on the hub")
    for variable in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        os.environ.setdefault(variable, str(int(TIMEOUT)))
    try:
        import datasets
    except ImportError as error:
        raise DataError("the package `datasets` is not installed: pip install 'datasets>=2.19'") from error
    try:
        train, test = (datasets.load_dataset(hub.repo, split=split) for split in ("train", hub.test))
    except Exception as error:  # that library raises exceptions from a dozen packages
        raise DataError(f"{hub.repo} cannot be loaded ({type(error).__name__}: {error})") from error
    x_train, y_train = _official_order(spec, *_decode(spec, hub, train))
    x_test, y_test = _decode(spec, hub, test)
    if spec.class_names is None:  # Tiny ImageNet: the hub's class names are WordNet ids, and we sort them
        wnids = list(train.features[hub.label].names)
        spec = replace(spec, class_names=tuple(sorted(wnids)))
        position = np.argsort(np.argsort(wnids))
        y_train, y_test = position[y_train], position[y_test]
    return spec.dataset(x_train, y_train, x_test, y_test)


def _decode(spec: Spec, hub: Hub, rows: Any) -> tuple[Array, Array]:
    for column in (hub.image, hub.label):
        if column not in rows.column_names:
            raise DataError(f"{hub.repo} has no column {column!r} (it has {', '.join(rows.column_names)})")
    x = np.empty((len(rows), *spec.shape), np.uint8)
    mode = "L" if spec.shape[2] == 1 else "RGB"
    with progress_bar("reading images", len(rows)) as advance:
        for i, row in enumerate(rows):
            image = np.asarray(row[hub.image].convert(mode)).reshape(-1, *spec.shape[1:])
            if image.shape != spec.shape:
                raise DataError(f"{hub.repo}: image {i} has shape {image.shape}, not {spec.shape}")
            x[i] = image
            advance(1)
    return x, np.asarray(rows[hub.label], np.int64)


def _official_order(spec: Spec, x: Array, y: Array) -> tuple[Array, Array]:
    """Sort the training files of CIFAR-10, which the hub keeps in the order of the archive."""
    if spec.blocks and len(x) % len(spec.blocks) == 0:
        blocks = np.arange(len(x)).reshape(len(spec.blocks), -1)
        sums = [md5(x[block]) for block in blocks]
        if sorted(sums) == sorted(spec.blocks):
            order = blocks[[sums.index(block) for block in spec.blocks]].ravel()
            return x[order], y[order]
    return x, y
