"""Scikit-learn's 8x8 handwritten digits: a data set that needs no download, with a fixed split."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset
from feddpc.data.specs import Spec
from feddpc.errors import DataError
from feddpc.rng import generator


def decode(spec: Spec) -> Dataset:
    """Return the digits as gray images (0..16 scaled to 0..255), 80 % for training and 20 % for testing."""
    table = np.loadtxt(_file(), delimiter=",")
    x = np.rint(table[:, :-1].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = _stratified(y, 0.2)
    return spec.dataset(x[~test], y[~test], x[test], y[test])


def _file() -> Path:
    """Return the path of the digits file. Importing scikit-learn takes a second and changes the environment."""
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise DataError("scikit-learn's file digits.csv.gz is missing: run `pip install --force-reinstall scikit-learn`")


def _stratified(y: Array, share: float) -> Array:
    """Mark ``share`` of the samples of every class, drawn with a fixed seed."""
    rng = generator(0, "digits-split")
    marked = np.zeros(len(y), bool)
    for label in np.unique(y):
        of_class = np.flatnonzero(y == label)
        marked[rng.permutation(of_class)[: round(share * len(of_class))]] = True
    return marked
