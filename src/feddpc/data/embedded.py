"""Data sets that need no download, with fixed splits: files of scikit-learn, which is always installed.

``digits``: 8x8 images of handwritten digits, 0..16 scaled to 0..255; 80 % of every class for training, the rest for
testing.

``diabetes``: a regression, 442 patients with 10 measurements each, and the progression of their disease one year later;
80 % for training, 20 % for testing. Measurements and targets are standardized with the mean and standard deviation of
the training part, so a model that predicts 0 has a mean squared error of 1 on it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset
from feddpc.data.specs import Spec
from feddpc.errors import DataError
from feddpc.rng import generator

_TEST_SHARE = 0.2


def decode(spec: Spec) -> Dataset:
    """Return the embedded data set that ``spec`` describes."""
    return spec.verify(digits(spec) if spec.name == "digits" else diabetes(spec))


def digits(spec: Spec) -> Dataset:
    """Return the digits as gray images."""
    table = _table("digits.csv.gz", ",")
    x = np.rint(table[:, :-1].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = _draw(y, "digits-split")
    return spec.dataset(x[~test], y[~test], x[test], y[test])


def diabetes(spec: Spec) -> Dataset:
    """Return the diabetes data, standardized."""
    x, y = _table("diabetes_data_raw.csv.gz", None), _table("diabetes_target.csv.gz", None)
    test = _draw(np.zeros(len(y), np.int64), "diabetes-split")
    x, y = ((a - a[~test].mean(0)) / a[~test].std(0) for a in (x, y))
    return spec.dataset(x[~test], y[~test], x[test], y[test])


def _table(file: str, delimiter: str | None) -> Array:
    """Read a file of scikit-learn. Importing scikit-learn takes a second and changes the environment."""
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / file
        if path.is_file():
            return np.loadtxt(path, delimiter=delimiter)
    raise DataError(f"scikit-learn's file {file} is missing: run `pip install --force-reinstall scikit-learn`")


def _draw(groups: Array, purpose: str) -> Array:
    """Mark a fixed share of the samples of every group for testing."""
    rng = generator(0, purpose)
    marked = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        marked[rng.permutation(members)[: round(_TEST_SHARE * len(members))]] = True
    return marked
