"""Load a data set by its name, from a file or folder, or from a function of the user's own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feddpc.data import embedded
from feddpc.data.array_checks import Target
from feddpc.data.dataset import Dataset
from feddpc.data.specs import SPECS
from feddpc.data.untrusted import read_npz
from feddpc.errors import BadInputError, DataError, unknown
from feddpc.registry import Registry, is_code, short_name

#: Functions of the user's own that return a data set.
DATA: Registry[Any] = Registry("data set", {}, accepts=inspect.isfunction)


def names() -> tuple[str, ...]:
    """Return the names of the known data sets.

    >>> names()
    ('digits', 'diabetes', 'fashion-mnist', 'cifar10', 'cifar100', 'tiny-imagenet', 'shakespeare')
    """
    return tuple(SPECS)


def is_own(name: str) -> bool:
    """Say whether ``name`` is a registered data set or one in a Python file."""
    return name in DATA.entries or is_code(name)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Dataset:
    """Return a data set by name, or from a path.

    A path is an ``.npz`` file, a folder of ``.npy`` files (:func:`feddpc.data.readers.read_arrays`), a folder or zip of
    images, a folder of LEAF's JSON files, or a table (``.csv`` or
    ``.parquet``), for which ``options`` are those of :func:`feddpc.data.tables.read_table`, ``target`` at least. A
    function of your own can be registered, or named as ``FILE.py:FUNCTION``; ``options`` are its arguments. A known
    name always means the known data set, even where a file has the same name: write ``./digits`` for the file.

    >>> load("digits")
    Dataset('digits', 10 classes, sample 8x8x1 uint8, 1438 train, 359 test)
    """
    return load_as(None, name_or_path, options, cache=cache)


def load_as(
    targets: Target | None,
    name_or_path: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Do what :func:`load` does, and read targets of the kind ``targets``.

    That counts for tables and arrays, unless ``options`` name the kind; without it, it follows from type and shape
    (:meth:`Dataset.from_arrays`). Known data sets and folders of images have the kind that they have.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if text not in SPECS and is_own(text):
        return _load_own(text, targets, options)
    if path.suffix in (".csv", ".parquet") and path.exists():
        from feddpc.data.tables import read_table

        check_options(f"data = {text!r}", read_table, options)
        return read_table(path, **{"kind": targets, **options})
    if options:
        raise BadInputError(f"data set {text!r} has no options, but {', '.join(options)} was given: leave it out")
    if text in SPECS:
        return _load_known(text, cache)
    if path.exists():
        return _load_path(path, targets)
    if isinstance(name_or_path, Path) or os.sep in text or path.suffix:
        raise DataError(f"{text} does not exist: give a file, a folder or one of {', '.join(SPECS)}")
    raise unknown("data set", text, SPECS)


def check_options(what: str, reader: Callable[..., Dataset], options: Mapping[str, Any]) -> None:
    """Raise unless ``options`` are some of the keyword-only parameters of ``reader``, and all without a default.

    >>> check_options("data = 't.csv'", lambda *, target, client=None: ..., {"client": "user"})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: data = 't.csv' needs data.target: give --set data.target=..., in Python data_options
    """
    parameters = inspect.signature(reader).parameters.values()
    valid = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in options:
        if option not in valid:
            raise unknown(f"option of {what}", option, valid)
    for name, needed in valid.items():
        if needed and name not in options:
            raise BadInputError(f"{what} needs data.{name}: give --set data.{name}=..., in Python data_options")


def _load_known(name: str, cache: str | os.PathLike[str] | None) -> Dataset:
    spec = SPECS[name]
    if spec.embedded:
        return embedded.decode(spec)
    from feddpc.data.fetch import cache as cache_files

    root = cache_files.cache_root(cache)
    if cache_files.is_cached(name, root):
        return cache_files.read(spec, root)
    raise DataError(
        f"{name} is not in the cache ({root}): run `{spec.command}`, or `{spec.command} --from FILE_OR_FOLDER` if you "
        "have a copy"
    )


def _load_path(path: Path, targets: Target | None) -> Dataset:
    if path.suffix == ".npz":
        return read_npz(path, target=targets)
    if (path / "x_train.npy").exists():
        from feddpc.data.readers import read_arrays

        return read_arrays(path, target=targets)
    if any(path.glob("train/*.json")):
        from feddpc.data.readers import read_leaf

        return read_leaf(path, target=targets)
    from feddpc.data.fetch import images

    return images.decode(path)


def _load_own(name: str, targets: Target | None, options: Mapping[str, Any]) -> Dataset:
    """Call the user's function, which returns a :class:`Dataset` or (x_train, y_train, x_test, y_test)."""
    dataset = DATA.build(name, {}, options)
    if isinstance(dataset, Dataset):
        return dataset
    if not isinstance(dataset, tuple | list) or len(dataset) != 4:
        raise DataError(f"data set {name!r} must return a Dataset or (x_train, y_train, x_test, y_test)")
    return Dataset.from_arrays(*dataset, name=short_name(name), target=targets)
