"""Fetch known data sets to this machine, decode them, and keep them in a cache.

``get`` fetches a data set, ``check`` verifies every byte of one, and ``entries`` lists what is known and what is here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from feddpc.data.dataset import Dataset
from feddpc.data.fetch import cache as cache_files
from feddpc.data.fetch import cifar, download, hub, idx, npm_cifar10, shakespeare, tiny_imagenet
from feddpc.data.fetch.archive import list_files
from feddpc.data.loading import load
from feddpc.data.specs import SPECS, Spec, spec
from feddpc.data.untrusted import read_npz
from feddpc.errors import DataError

PathLike = str | os.PathLike[str]
_DECODERS = {
    "idx": idx.decode,
    "cifar": cifar.decode,
    "tiny-imagenet": tiny_imagenet.decode,
    "play": shakespeare.decode,
}


@dataclass(frozen=True)
class Entry:
    """One line of ``feddpc data list``; ``command`` fetches the data set where ``state`` is "absent"."""

    name: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    state: str
    command: str | None


@dataclass(frozen=True)
class Fetched:
    """The result of ``get``: the source ("embedded", "cached", a route or a path) and the folder in the cache."""

    name: str
    source: str
    folder: Path | None


def get(
    name: str,
    source: PathLike | None = None,
    *,
    cache: PathLike | None = None,
    force: bool = False,
) -> Fetched:
    """Fetch a known data set into the cache.

    ``source`` is a local file or folder, or one of the routes "official", "hub" and "npm". Without it, an intact cached
    copy is kept (unless ``force``), else all routes are tried in turn.
    """
    wanted, root = spec(name), cache_files.cache_root(cache)
    if wanted.embedded:
        return Fetched(name, "embedded", None)
    if source is not None and os.fspath(source) not in ROUTES:
        data = from_path(wanted, Path(source).expanduser())
        return Fetched(name, os.fspath(source), cache_files.write(data, root))
    if source is None and not force and _is_intact(wanted, root):
        return Fetched(name, "cached", cache_files.folder(name, root))
    failures = []
    for route in routes_of(wanted) if source is None else [os.fspath(source)]:
        try:
            data = ROUTES[route](wanted, root)
        except DataError as error:
            failures.append(f"  {route}: {error}")
            continue
        return Fetched(name, route, cache_files.write(data, root))
    raise DataError(
        f"{name} could not be fetched:\n" + "\n".join(failures) + "\n"
        f"Download {' and '.join(a.url for a in wanted.archives)} on another machine, then run "
        f"`{wanted.command} --from FILE_OR_FOLDER`"
    )


def check(name_or_path: PathLike, *, cache: PathLike | None = None) -> dict[str, str]:
    """Verify every byte of a data set and return its checksums by array; DataError says what is wrong."""
    name, root = os.fspath(name_or_path), cache_files.cache_root(cache)
    if name in SPECS and cache_files.is_cached(name, root):
        return cache_files.read(SPECS[name], root, checksums=True).checksums()
    return load(name_or_path, cache=cache).checksums()


def entries(*, cache: PathLike | None = None) -> list[Entry]:
    """Describe every known data set and whether it is on this machine: embedded, ready or absent."""
    root, rows = cache_files.cache_root(cache), []
    for s in SPECS.values():
        state = "embedded" if s.embedded else "ready" if cache_files.is_cached(s.name, root) else "absent"
        command = s.command if state == "absent" else None
        rows.append(Entry(s.name, s.classes, s.shape, s.train, s.test, state, command))
    return rows


def _is_intact(wanted: Spec, root: Path) -> bool:
    """Whether the cache has a copy that can be read; a damaged one, or one of an older format, is fetched again."""
    try:
        return cache_files.is_cached(wanted.name, root) and bool(cache_files.read(wanted, root))
    except DataError:
        return False


def from_path(spec: Spec, path: Path) -> Dataset:
    """Decode and verify a file or folder on this machine."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give an archive or a folder of {spec.name}")
    for archive in spec.archives:
        if path.name == archive.file and path.is_file() and (actual := download.file_md5(path)) != archive.md5:
            raise DataError(f"the md5 of {path} is {actual}, but the official file has {archive.md5}: get it again")
    if path.suffix == ".npz":
        data = read_npz(path)
        arrays = {field: getattr(data, field) for field in data.stored_fields}
        return spec.verify(spec.dataset(**arrays))
    if spec.name == "cifar10" and npm_cifar10.recognize(list_files(path)):
        return spec.verify(npm_cifar10.decode(spec, path))
    return spec.verify(_DECODERS[spec.format](spec, path))


def from_official(spec: Spec, cache: Path) -> Dataset:
    """Download the official archives, decode them, and delete them."""
    folder = cache / "downloads" / spec.name
    files = [download.download(archive, folder) for archive in spec.archives]
    data = from_path(spec, files[0] if len(files) == 1 else folder)
    for file in files:
        file.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty while a part of another archive is there
        folder.rmdir()
    return data


ROUTES: dict[str, Callable[[Spec, Path], Dataset]] = {
    "official": from_official,
    "hub": lambda spec, _cache: spec.verify(hub.fetch(spec)),
    "npm": lambda spec, _cache: spec.verify(npm_cifar10.fetch(spec)),
}


def routes_of(spec: Spec) -> list[str]:
    """Return the routes that can deliver ``spec``, best first."""
    offers = {"official": spec.archives, "hub": spec.hub, "npm": spec.npm}
    return [route for route in ROUTES if offers[route]]
