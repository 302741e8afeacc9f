"""A data set in memory, and the checks that its arrays must pass before training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from feddpc.errors import BadInputError, DataError

Array = npt.NDArray[Any]
#: A larger label is taken for a mistake: a model with that many outputs would fill the memory.
MAX_CLASSES = 100_000
FIELDS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test samples with their labels.

    Images are uint8 ``[n, height, width, channels]``; all other data are float32 ``[n, ...]`` and are never rescaled.
    Labels are int64 ``[n]`` in ``0..classes-1``. Use :meth:`from_arrays` to build a data set from your own arrays; it
    checks all of this.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    class_names: tuple[str, ...] | None = None

    @cached_property
    def digest(self) -> str:
        """A hash of all samples and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for field in FIELDS:
            array = np.ascontiguousarray(getattr(self, field))
            digest.update(f"{field} {array.dtype} {array.shape}".encode())
            digest.update(array.data)
        return digest.hexdigest()

    @classmethod
    def from_arrays(
        cls,
        x_train: Any,
        y_train: Any,
        x_test: Any,
        y_test: Any,
        *,
        name: str = "custom",
        classes: int | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> Dataset:
        """Build a data set from numpy arrays or torch tensors, after checking them.

        Samples are uint8 images, or floating-point arrays of any shape (kept as float32). A uint8 array ``[n, H, W]``
        gets a channel axis; ``[n, H, W, C]`` is not changed if its last axis has size 1 or 3; otherwise
        ``[n, C, H, W]`` with C 1 or 3 (torch's convention) is transposed. Labels are integers, ``[n]`` or ``[n, 1]``.
        ``classes`` defaults to the largest label plus one.

        >>> x = np.zeros((4, 3, 8, 8), np.uint8)
        >>> Dataset.from_arrays(x, [0, 1, 2, 1], x, [0, 1, 2, 1])
        Dataset('custom', 3 classes, sample 8x8x3 uint8, 4 train, 4 test)
        """
        xs = {"x_train": _samples(x_train, "x_train"), "x_test": _samples(x_test, "x_test")}
        ys = {"y_train": _labels(y_train, "y_train"), "y_test": _labels(y_test, "y_test")}
        for part in ("train", "test"):
            x, y = xs[f"x_{part}"], ys[f"y_{part}"]
            if len(x) != len(y):
                raise DataError(
                    f"x_{part} has {len(x)} samples but y_{part} has {len(y)} labels: give one label per sample"
                )
        train, test = xs["x_train"], xs["x_test"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"samples of x_train are {_shape(train)} but those of x_test are {_shape(test)}: "
                "give both the same shape and type"
            )
        if classes is None:
            classes = int(max(y.max() for y in ys.values())) + 1
        _check_range(ys, classes)
        if class_names is not None and len(class_names) != classes:
            raise BadInputError(f"{len(class_names)} class names for {classes} classes: give one name per class")
        labels = {field: y.astype(np.int64) for field, y in ys.items()}
        return cls(name=name, classes=classes, class_names=class_names, **xs, **labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample: ``(height, width, channels)`` for images."""
        return tuple(self.x_train.shape[1:])

    @property
    def is_image(self) -> bool:
        """Whether samples are uint8 images, to be scaled and normalized before training."""
        return bool(self.x_train.dtype == np.uint8)

    def checksums(self) -> dict[str, str]:
        """Return the md5 of every array's bytes, labels as uint8 where they fit (as the cache stores them)."""
        return {field: md5(compact(getattr(self, field))) for field in FIELDS}

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, {self.classes} classes, sample {_shape(self.x_train)}, "
            f"{len(self.x_train)} train, {len(self.x_test)} test)"
        )


def md5(array: Array) -> str:
    """Return the md5 of the array's bytes in C order."""
    return hashlib.md5(np.ascontiguousarray(array).data, usedforsecurity=False).hexdigest()


def compact(array: Array) -> Array:
    """Return int64 labels as uint8 where they fit, and any other array unchanged."""
    if array.dtype == np.int64 and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    return array


def _numpy(value: Any) -> Array:
    # Recognized by a method, so that torch is not imported for users of numpy.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()  # numpy has no bfloat16
        value = value.numpy()
    return np.asarray(value)


def _samples(value: Any, field: str) -> Array:
    x = _numpy(value)
    if x.ndim == 0 or x.size == 0:
        raise DataError(f"{field} is empty (shape {x.shape}): give at least one sample")
    if x.dtype == np.uint8:
        return _images(x, field)
    if not np.issubdtype(x.dtype, np.floating):
        raise DataError(f"{field} has type {x.dtype}: give uint8 images (0..255) or float32 arrays")
    with np.errstate(over="ignore"):  # a float64 beyond the range of float32 becomes Inf and is reported below
        x = np.ascontiguousarray(x, dtype=np.float32)
    bad = ~np.isfinite(x)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{field} holds {int(bad.sum())} values that are NaN or infinite, the first ({x[first]}) at index {first}: "
            "remove or replace them"
        )
    return x


def _images(x: Array, field: str) -> Array:
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[-1] not in (1, 3) and x.shape[1] in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    if x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise DataError(
            f"{field} is uint8 of shape {x.shape}: images are [n, H, W], [n, H, W, C] or [n, C, H, W] "
            "with 1 or 3 channels; give anything else as float32"
        )
    return np.ascontiguousarray(x)


def _labels(value: Any, field: str) -> Array:
    y = _numpy(value)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{field} has shape {y.shape}: give one integer label per sample, shape [n]")
    if y.size == 0:
        raise DataError(f"{field} is empty: give at least one label")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{field} has type {y.dtype} (first value {y[0]}): labels are integers, 0 to classes - 1")
    if y.max() >= MAX_CLASSES:
        raise DataError(f"{field}[{y.argmax()}] is {y.max()}: class numbers are 0 or larger and below {MAX_CLASSES}")
    return y


def _check_range(ys: dict[str, Array], classes: int) -> None:
    if isinstance(classes, bool) or int(classes) != classes or classes < 1:
        raise BadInputError(f"classes is {classes!r}: give a whole number, at least 1")
    for field, y in ys.items():
        bad = np.flatnonzero((y < 0) | (y >= classes))
        if bad.size:
            raise DataError(
                f"{field}[{bad[0]}] is {y[bad[0]]}, but with {classes} classes a label is 0 to {classes - 1} "
                f"({bad.size} such labels)"
            )


def _shape(x: Array) -> str:
    return f"{'x'.join(str(n) for n in x.shape[1:]) or 'scalar'} {x.dtype}"
