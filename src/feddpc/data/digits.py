"""Scikit-learn's 8x8 handwritten digits: a data set that is always there, split the same way every time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from feddpc.data.dataset import Array, Dataset
from feddpc.data.specs import Spec
from feddpc.errors import DataError
from feddpc.rng import generator


def decode(spec: Spec) -> Dataset:
    """Return the digits as grey images (the sixteen steps stretched to 0..255), 80 % for training, 20 % for testing."""
    table = np.loadtxt(_file(), delimiter=",")
    x = np.rint(table[:, :-1].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = _stratified(y, 0.2)
    return Dataset.from_arrays(
        x[~test], y[~test], x[test], y[test], name=spec.name, classes=spec.classes, class_names=spec.class_names
    )


def _file() -> Path:
    """Return where the digits lie. Importing scikit-learn for them takes a second, and changes the environment."""
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise DataError("scikit-learn's digits are not here: run `pip install --force-reinstall scikit-learn`")


def _stratified(y: Array, share: float) -> Array:
    """Mark ``share`` of every class, at random but always the same ones."""
    rng = generator(0, "digits-split")
    marked = np.zeros(len(y), bool)
    for label in np.unique(y):
        of_class = np.flatnonzero(y == label)
        marked[rng.permutation(of_class)[: round(share * len(of_class))]] = True
    return marked
