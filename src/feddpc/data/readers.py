"""Readers that turn other libraries' data sets, tables and LEAF's files into a :class:`Dataset`.

| function | reads |
|---|---|
| :func:`from_torch` | a pair of ``torch.utils.data.Dataset`` |
| :func:`from_hugging_face` | a ``datasets.Dataset`` or ``DatasetDict`` |
| :func:`read_table` | a table in a ``.csv`` or ``.parquet`` file |
| :func:`read_leaf` | the JSON files of LEAF (Caldas et al. 2018): FEMNIST, Shakespeare and others |

``load`` reads ``.npz`` files, with ``client_ids`` if the data have clients. Where a source has no test part, ``test``
is the share of the samples to be drawn for it, with ``seed``: the same seed draws the same samples. Classes that are
given as text are numbered in sorted order, and ``class_names`` keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.data.array_checks import IGNORED, Array, Target, to_numpy
from feddpc.data.dataset import FIELDS, Dataset
from feddpc.data.tables import from_hugging_face as from_hugging_face
from feddpc.data.tables import read_table as read_table
from feddpc.data.untrusted import decoding_errors
from feddpc.errors import BadInputError, DataError


def from_torch(
    train: Any,
    test: Any,
    *,
    name: str = "custom",
    progress: Callable[[int], object] | None = None,
    **options: Any,
) -> Dataset:
    """Read two map-style torch data sets of pairs (sample, target), once, from the first to the last.

    Samples and targets are tensors, arrays or numbers, all of one shape: give images through a transform such as
    torchvision's ``PILToTensor``. Random transforms are applied once, not in every epoch. ``progress`` is called with 1
    after every sample. ``options`` are those of :meth:`Dataset.from_arrays`.
    """
    arrays: dict[str, Any] = {}
    for part, source in (("train", train), ("test", test)):
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise BadInputError(
                f"{part} is a {type(source).__name__}: give a torch data set with a length and an index"
            )
        xs, ys = [], []
        for i in range(len(source)):
            pair = source[i]
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise BadInputError(f"{part}[{i}] is a {type(pair).__name__}: it must be a pair (sample, target)")
            xs.append(to_numpy(pair[0], f"sample of {part}[{i}]"))
            ys.append(to_numpy(pair[1], f"target of {part}[{i}]"))
            if progress is not None:
                progress(1)
        arrays |= {f"x_{part}": _stack(xs, f"samples of {part}"), f"y_{part}": _stack(ys, f"targets of {part}")}
    return Dataset.from_arrays(**arrays, name=name, **options)


def read_arrays(folder: str | Path, *, name: str | None = None, target: Target | None = None) -> Dataset:
    """Read ``x_train.npy``, ``y_train.npy``, ``x_test.npy``, ``y_test.npy``, and ``client_ids.npy`` if it is there.

    The files are mapped into memory: samples are read when a client that holds them takes part, so that there may be
    more of them than fit. Save images as uint8, other samples as float32 or int64; other types are converted at once.
    ``target`` is that of :meth:`Dataset.from_arrays`.
    """
    folder = Path(folder).expanduser()
    wanted = [*FIELDS, *(["client_ids"] if (folder / "client_ids.npy").exists() else [])]
    arrays = {}
    for field in wanted:
        try:
            arrays[field] = np.load(folder / f"{field}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:
            raise DataError(f"{folder / field}.npy cannot be read: {str(error).splitlines()[0]}") from None
    return Dataset.from_arrays(**arrays, name=name or folder.name, target=target)


def read_leaf(folder: str | Path, *, name: str | None = None, target: Target | None = None) -> Dataset:
    """Read the JSON files of LEAF in the folders ``train`` and ``test``: users, and for each user its ``x`` and ``y``.

    Each user is a client. Numbers stay numbers. Text (Shakespeare) becomes characters: a sample is a row of character
    numbers, padded with character 0 where texts are shorter, and its target the number of the next character, a class.
    (Targets of several characters are tokens, padded with -100.)
    The vocabulary is the set of characters in the files, sorted; ``class_names`` holds it. ``target`` is that of
    :meth:`Dataset.from_arrays`.
    """
    folder = Path(folder).expanduser()
    parts = {part: _leaf_part(folder / part) for part in ("train", "test")}
    raw = {f"{axis}_{part}": values[axis] for part, values in parts.items() for axis in "xy"}
    texts = [isinstance(values[0], str) for values in raw.values()]
    arrays: dict[str, Any] = raw
    vocabulary: tuple[str, ...] | None = None
    if all(texts):
        vocabulary = tuple(sorted({character for values in raw.values() for text in values for character in text}))
        code = {character: number for number, character in enumerate(vocabulary)}
        arrays = {}
        for field, values in raw.items():
            padding = 0 if field.startswith("x") else IGNORED
            arrays[field] = np.full((len(values), max(len(text) for text in values)), padding, np.int64)
            for row, text in zip(arrays[field], values, strict=True):
                row[: len(text)] = [code[character] for character in text]
        widest = max(arrays["x_train"].shape[1], arrays["x_test"].shape[1])
        for field in ("x_train", "x_test"):
            arrays[field] = np.pad(arrays[field], ((0, 0), (0, widest - arrays[field].shape[1])))
    elif any(texts):
        raise DataError(f"{folder} mixes text and numbers in x and y: give both as text, or both as numbers")
    return Dataset.from_arrays(
        **arrays,
        name=name or folder.name,
        classes=None if vocabulary is None else len(vocabulary),
        class_names=vocabulary,
        target=target,
        client_ids=parts["train"]["owner"],
    )


def _leaf_part(folder: Path) -> dict[str, list[Any]]:
    """Return all samples, targets and owners of one folder, file by file in sorted order."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder} has no .json files: give the folder of LEAF's data with train/ and test/")
    values: dict[str, list[Any]] = {"x": [], "y": [], "owner": []}
    for file in files:
        with decoding_errors(f"{file} is not a file of LEAF, with users and user_data"):
            content = json.loads(file.read_text(encoding="utf-8"))
            for user in content["users"]:
                x, y = content["user_data"][user]["x"], content["user_data"][user]["y"]
                if len(x) != len(y):
                    raise DataError(f"{file}: user {user} has {len(x)} samples, but {len(y)} targets: get it again")
                values["x"] += x
                values["y"] += y
                values["owner"] += [str(user)] * len(x)
    if not values["x"]:
        raise DataError(f"{folder} holds no samples: give files of LEAF with at least one user")
    return values


def _stack(values: list[Array], what: str) -> Array:
    shapes = {value.shape for value in values}
    if len(shapes) != 1:
        several = ", ".join(str(shape) for shape in sorted(shapes)[:3]) or "none"
        raise BadInputError(f"{what} have the shapes {several}: give all of them one shape")
    return np.stack(values)
