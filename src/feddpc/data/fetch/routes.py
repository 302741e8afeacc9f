"""The routes by which a known data set reaches this machine. Each returns the verified data or raises DataError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from feddpc.data import npz
from feddpc.data.dataset import FIELDS, Dataset
from feddpc.data.fetch import cifar, hub, idx, npm_cifar10, tiny_imagenet
from feddpc.data.fetch.archive import list_files
from feddpc.data.fetch.download import download, file_md5
from feddpc.data.specs import Spec
from feddpc.errors import DataError

_DECODERS = {"idx": idx.decode, "cifar": cifar.decode, "tiny-imagenet": tiny_imagenet.decode}


def from_path(spec: Spec, path: Path) -> Dataset:
    """Decode and verify a file or folder on this machine."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give an archive or a folder of {spec.name}")
    for archive in spec.archives:
        if path.name == archive.file and path.is_file() and (actual := file_md5(path)) != archive.md5:
            raise DataError(f"the md5 of {path} is {actual}, but the official file has {archive.md5}: get it again")
    if path.suffix == ".npz":
        data = npz.decode(path)
        return spec.verify(spec.dataset(*(getattr(data, field) for field in FIELDS)))
    if spec.name == "cifar10" and npm_cifar10.recognize(list_files(path)):
        return spec.verify(npm_cifar10.decode(spec, path))
    return spec.verify(_DECODERS[spec.format](spec, path))


def from_official(spec: Spec, cache: Path) -> Dataset:
    """Download the official archives, decode them, and delete them."""
    folder = cache / "downloads" / spec.name
    files = [download(archive, folder) for archive in spec.archives]
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
