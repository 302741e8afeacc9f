"""Scikit-learn's 8x8 handwritten digits: a data set that is always there, split the same way every time."""

from __future__ import annotations

import numpy as np

from feddpc import chance
from feddpc.data.dataset import Array, Dataset
from feddpc.data.specs import Spec


def decode(spec: Spec) -> Dataset:
    """Return the digits as grey images (the sixteen steps stretched to 0..255), 80 % for training, 20 % for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(np.asarray(bunch.images) * 255 / 16).astype(np.uint8)
    y = np.asarray(bunch.target, np.int64)
    test = _stratified(y, 0.2)
    return Dataset.from_arrays(
        x[~test], y[~test], x[test], y[test], name=spec.name, classes=spec.classes, class_names=spec.class_names
    )


def _stratified(y: Array, share: float) -> Array:
    """Mark ``share`` of every class, at random but always the same ones."""
    rng = chance.rng(0, "digits-split")
    marked = np.zeros(len(y), bool)
    for label in np.unique(y):
        of_class = np.flatnonzero(y == label)
        marked[rng.permutation(of_class)[: round(share * len(of_class))]] = True
    return marked
