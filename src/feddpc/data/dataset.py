"""A data set in memory, and the checks that its arrays must pass before training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from feddpc.data.array_checks import (
    TARGET_CHECKS,
    Array,
    Target,
    check_alike,
    check_client_ids,
    check_count,
    check_samples,
    describe,
    infer_target,
    to_numpy,
)
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError, DataError, unknown

FIELDS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test samples with their targets. :meth:`from_arrays` builds one from your own arrays and checks it.

    Samples are uint8 images ``[n, height, width, channels]``, other uint8 arrays (plain bytes, which reach the model as
    numbers from 0 to 255), float32 arrays ``[n, ...]``, or int64 arrays (tokens, which reach the model as integers).
    Only images are scaled.

    ``target`` says what ``y_train`` and ``y_test`` hold, and so what ``classes`` counts:

    | target | array | ``classes`` |
    |---|---|---|
    | ``classes`` | int64 ``[n]``, from 0 to classes - 1 | the number of classes |
    | ``floats`` | float32 ``[n]`` or ``[n, k]`` | the number of outputs, 1 or k |
    | ``multihot`` | float32 ``[n, k]`` of 0 and 1 | the number of labels, k |
    | ``tokens`` | int64 ``[n, T]``, from 0 to classes - 1, or -100 where nothing is to be predicted | the vocabulary |

    ``client_ids`` holds the owner of each training sample, if the data come from real clients; see
    :meth:`natural_partition`.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    class_names: tuple[str, ...] | None = None
    target: Target = "classes"
    client_ids: Array | None = None

    @cached_property
    def digest(self) -> str:
        """A hash of all samples, targets and client ids."""
        digest = hashlib.blake2b(digest_size=16)
        for field in self.stored_fields:
            array = np.ascontiguousarray(getattr(self, field))
            digest.update(f"{field} {array.dtype} {array.shape}".encode())
            digest.update(array.data)
        if self.target != "classes":
            digest.update(self.target.encode())
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
        target: Target | None = None,
        client_ids: Any = None,
    ) -> Dataset:
        """Build a data set from numpy arrays or torch tensors, after checking them.

        **Samples.** Floating-point arrays of any shape are kept as float32, and integers other than uint8 as int64. A
        uint8 array ``[n, H, W]`` gets a channel axis; ``[n, H, W, C]`` is not changed if its last axis has size 1 or 3;
        otherwise ``[n, C, H, W]`` with C 1 or 3 (torch's convention) is transposed. uint8 arrays of all other shapes
        are kept as plain bytes.

        **Targets.** Unless ``target`` is given, it follows from the type and shape of ``y_train`` and ``y_test``:
        floats are ``floats``; integers ``[n]`` or ``[n, 1]`` are ``classes``; integers ``[n, k]`` are ``multihot`` if
        all of them are 0 or 1, and ``tokens`` otherwise. Give ``target`` where that is not what you mean, for example
        ``target="floats"`` for whole numbers to be predicted, or ``"multihot"`` for floats of 0 and 1.

        ``classes`` defaults to the largest label plus one; for tokens, to the largest token of samples and targets plus
        one. ``client_ids`` is one integer or string per training sample.

        >>> x = np.zeros((4, 3, 8, 8), np.uint8)
        >>> Dataset.from_arrays(x, [0, 1, 2, 1], x, [0, 1, 2, 1])
        Dataset('custom', 3 classes, sample 8x8x3 uint8, 4 train, 4 test)
        >>> rows, prices = np.zeros((2, 5)), [0.5, 1.5]
        >>> Dataset.from_arrays(rows, prices, rows, prices, client_ids=["ann", "bob"])
        Dataset('custom', target floats, 1 outputs, 2 clients, sample 5 float32, 2 train, 2 test)
        """
        xs = {"x_train": check_samples(x_train, "x_train"), "x_test": check_samples(x_test, "x_test")}
        raw = {"y_train": to_numpy(y_train, "y_train"), "y_test": to_numpy(y_test, "y_test")}
        kind = infer_target(list(raw.values())) if target is None else target
        if kind not in get_args(Target):
            raise unknown("target", str(kind), get_args(Target))
        ys = {field: TARGET_CHECKS[kind](y, field) for field, y in raw.items()}
        for part in ("train", "test"):
            x, y = xs[f"x_{part}"], ys[f"y_{part}"]
            if len(x) != len(y):
                raise DataError(
                    f"x_{part} has {len(x)} samples but y_{part} has {len(y)} labels: give one label per sample"
                )
        check_alike("samples", "x", xs)
        check_alike("targets", "y", ys)
        count = check_count(kind, xs, ys, classes)
        if class_names is not None and len(class_names) != count:
            raise BadInputError(f"{len(class_names)} class names for {count} classes: give one name per class")
        ids = None if client_ids is None else check_client_ids(client_ids, len(xs["x_train"]))
        return cls(name=name, classes=count, class_names=class_names, target=kind, client_ids=ids, **xs, **ys)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample: ``(height, width, channels)`` for images."""
        return tuple(self.x_train.shape[1:])

    @property
    def is_image(self) -> bool:
        """Whether samples are uint8 images, to be scaled and normalized before training."""
        shape = self.x_train.shape
        return bool(self.x_train.dtype == np.uint8) and len(shape) == 4 and shape[-1] in (1, 3)

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """A group per training sample, for draws that keep proportions: its class; 0 for all where there are none."""
        return self.y_train if self.target == "classes" else np.zeros(len(self.y_train), np.int64)

    def require_classes(self, what: str, remedy: str) -> None:
        """Raise unless targets are class numbers; ``what`` needs them, and ``remedy`` says what to do instead."""
        if self.target != "classes":
            raise BadInputError(
                f"{what} needs class labels, but the targets of {self.name} are {self.target}: {remedy}"
            )

    def natural_partition(self) -> tuple[Partition, tuple[str, ...]]:
        """Return the partition with one client per id in ``client_ids``, and the clients' names.

        Clients are in the order of their sorted ids: integers by value, strings by code point.

        >>> x, y = np.zeros((3, 1)), [0, 1, 1]
        >>> partition, names = Dataset.from_arrays(x, y, x, y, client_ids=["bob", "ann", "bob"]).natural_partition()
        >>> names, partition[1].tolist()
        (('ann', 'bob'), [0, 2])
        """
        if self.client_ids is None or len(self.client_ids) != len(self.y_train):
            given = "none" if self.client_ids is None else f"{len(self.client_ids)} ids for {len(self.y_train)} samples"
            raise BadInputError(
                f"the natural partition of {self.name} needs client_ids, one per training sample, but it has {given}: "
                "give client_ids, or use partition = 'iid'"
            )
        return Partition.from_owners(self.client_ids), tuple(str(i) for i in np.unique(self.client_ids))

    def checksums(self) -> dict[str, str]:
        """Return the md5 of every array's bytes, labels as uint8 where they fit (as the cache stores them)."""
        return {field: md5(self.stored(field)) for field in self.stored_fields}

    def stored(self, field: str) -> Array:
        """Return an array as the cache stores it: whole targets as uint8 where they fit."""
        array: Array = getattr(self, field)
        if field.startswith("y") and array.dtype == np.int64 and 0 <= array.min() <= array.max() <= 255:
            return array.astype(np.uint8)
        return array

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The names of the arrays that this data set has."""
        return FIELDS if self.client_ids is None else (*FIELDS, "client_ids")

    def __repr__(self) -> str:
        counted = {"classes": "classes", "floats": "outputs", "multihot": "labels", "tokens": "tokens"}[self.target]
        kind = (
            f"{self.classes} {counted}"
            if self.target == "classes"
            else f"target {self.target}, {self.classes} {counted}"
        )
        owners = "" if self.client_ids is None else f"{len(np.unique(self.client_ids))} clients, "
        return (
            f"Dataset({self.name!r}, {kind}, {owners}sample {describe(self.x_train)}, "
            f"{len(self.x_train)} train, {len(self.x_test)} test)"
        )


def md5(array: Array) -> str:
    """Return the md5 of the array's bytes in C order."""
    return hashlib.md5(np.ascontiguousarray(array).data, usedforsecurity=False).hexdigest()
