"""The routes by which a known data set reaches this machine. Each returns the verified data or raises DataError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from feddpc.data import npz
from feddpc.data.dataset import Dataset
from feddpc.data.fetch import cifar, hub, idx, images, npm_cifar10, tiny_imagenet
from feddpc.data.fetch.archive import list_files
from feddpc.data.fetch.download import download, file_md5
from feddpc.data.specs import SPECS, Spec
from feddpc.errors import DataError


def from_path(spec: Spec, path: Path) -> Dataset:
    """Decode and verify a file or folder on this machine."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give an archive or a folder of {spec.name}")
    for archive in spec.archives:
        if path.name == archive.file and path.is_file() and (actual := file_md5(path)) != archive.md5:
            raise DataError(f"the md5 of {path} is {actual}, but the official file has {archive.md5}: get it again")
    if path.suffix == ".npz":
        data = npz.decode(path)
    elif spec.format == "tiny-imagenet":
        data = tiny_imagenet.decode(spec, path)
    elif spec.format == "idx":
        data = idx.decode(path)
    else:
        decode = npm_cifar10.decode if npm_cifar10.recognize(list_files(path)) else cifar.decode
        data = decode(spec, path)
    names = data.class_names or spec.class_names
    return spec.verify(replace(data, name=spec.name, classes=spec.classes, class_names=names))


def from_unknown_path(path: Path) -> Dataset:
    """Decode a file or folder after recognizing its format by the names of its files."""
    if path.suffix == ".npz":
        return npz.decode(path)
    names = list_files(path)
    known = cifar.recognize(names) or ("cifar10" if npm_cifar10.recognize(names) else None)
    if known or tiny_imagenet.recognize(names):
        return from_path(SPECS[known or "tiny-imagenet"], path)
    if idx.recognize(names):
        return idx.decode(path)
    if images.recognize(names):
        return images.decode(path)
    raise DataError(
        f"{path} is not a data set of a known format: give an .npz with x_train, y_train, x_test, y_test; a folder or "
        "zip with train/CLASS/*.png and test/CLASS/*.png; IDX files; or the official files of CIFAR (binary version) "
        "or Tiny ImageNet"
    )


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
