"""Load a data set by its name, or from an ``.npz`` file or a folder of images."""

from __future__ import annotations

import os
from pathlib import Path

from feddpc.data import digits, npz, own
from feddpc.data.dataset import Dataset
from feddpc.data.specs import SPECS
from feddpc.errors import DataError, unknown


def names() -> tuple[str, ...]:
    """Return the names of the known data sets.

    >>> names()
    ('digits', 'fashion-mnist', 'cifar10', 'cifar100', 'tiny-imagenet')
    """
    return tuple(SPECS)


def load(name_or_path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> Dataset:
    """Return a data set by name, or from the path of an ``.npz`` or of a folder or zip of images.

    A function of your own can be registered, or named as ``FILE.py:FUNCTION``. A known name always means the known
    data set, even where a file has the same name: write ``./digits`` for the file.

    >>> load("digits")
    Dataset('digits', 10 classes, sample 8x8x1 uint8, 1438 train, 359 test)
    """
    text = os.fspath(name_or_path)
    if text == "digits":
        return SPECS[text].verify(digits.decode(SPECS[text]))
    if text in SPECS:
        from feddpc.data.fetch import cache as cache_files

        root, command = cache_files.cache_root(cache), SPECS[text].command
        if cache_files.is_cached(text, root):
            return cache_files.read(SPECS[text], root)
        raise DataError(
            f"{text} is not in the cache ({root}): run `{command}`, or `{command} --from FILE_OR_FOLDER` if you have "
            "a copy"
        )
    if own.is_own(text):
        return own.load_own(text)
    path = Path(text).expanduser()
    if path.exists():
        from feddpc.data.fetch import images

        return npz.decode(path) if path.suffix == ".npz" else images.decode(path)
    if isinstance(name_or_path, Path) or os.sep in text or path.suffix:
        raise DataError(f"{text} does not exist: give a file, a folder or one of {', '.join(SPECS)}")
    raise unknown("data set", text, SPECS)
