"""Image files to arrays, and folders of image files to data sets."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

import numpy as np

from feddpc.data.dataset import Array, Dataset
from feddpc.data.limits import check_growth, damage_as_error
from feddpc.data.progress import bar
from feddpc.data.tree import Tree, open_tree
from feddpc.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".png", ".jpg", ".jpeg"}
#: Whatever a file is called: among the many formats that Pillow knows are some that start other programs.
FORMATS = ("PNG", "JPEG")
#: One image of a data set has far fewer; a sheet of ten thousand small ones has ten million.
MOST_PIXELS = 1 << 24
_EIGHT_BIT = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
Mode = Literal["L", "RGB"]


def pixels(content: bytes, where: str, mode: Mode) -> Array:
    """Decode one 8-bit image to uint8 ``[height, width, 1 or 3]``, grey or RGB as ``mode`` says."""
    with damage_as_error(f"{where} is not a readable image"), _opened(content, where) as image:
        if image.mode not in _EIGHT_BIT:
            raise DataError(f"{where} has the pixel type {image.mode}: only 8-bit images are read; convert it")
        # Pillow warns when a palette's transparency is dropped in one step.
        opaque = image.convert("RGBA") if "transparency" in image.info else image
        array = np.asarray(opaque.convert(mode))
    return array[..., None] if array.ndim == 2 else array


def _opened(content: bytes, where: str) -> Image.Image:
    from PIL import Image

    image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise DataError(f"{where} is {image.width}x{image.height} pixels, more than any data set's: make it smaller")
    return image


def stack(tree: Tree, names: list[str], *, mode: Mode, text: str, show: bool | None) -> Array:
    """Decode the named files into one array, in the order given; all must have the first one's size."""
    place = {name: i for i, name in enumerate(names)}
    out: Array | None = None
    first, packed, done = "", 0, 0
    with bar(text, len(names), show=show) as advance:
        for name, content in tree.read(names):
            image = pixels(content, f"{tree.path}/{name}", mode)
            packed += len(content)
            if out is None:
                with damage_as_error(f"{tree.path}: {len(names)} images of {_size(image.shape)} do not fit in memory"):
                    out, first = np.empty((len(names), *image.shape), np.uint8), name
            if image.shape != out.shape[1:]:
                raise DataError(
                    f"{tree.path}/{name} is {_size(image.shape)} but {first} is {_size(out.shape[1:])}: "
                    "all images must have one size; resize them"
                )
            done += image.nbytes
            check_growth(f"{tree.path} with its images", packed, done)
            out[place[name]] = image
            advance(1)
    assert out is not None, "callers name at least one file"
    return out


def fits(names: list[str]) -> bool:
    """Whether these file names are a train/CLASS, test/CLASS tree of images."""
    return _root(names) is not None


def decode(path: Path, show: bool | None = None) -> Dataset:
    """Read ``train/CLASS/*.png|jpg|jpeg`` and ``test/CLASS/...``; classes are numbered in sorted order."""
    tree = open_tree(path)
    names = tree.names()
    root = _root(names)
    if root is None:
        raise DataError(f"{path} has no images under train/CLASS/ and test/CLASS/")
    parts = {part: _by_class(names, f"{root}{part}/") for part in ("train", "test")}
    train, test = set(parts["train"]), set(parts["test"])
    if train != test:
        raise DataError(
            f"{path}: train/ and test/ must hold the same classes; only in train: {_some(train - test)}; "
            f"only in test: {_some(test - train)}"
        )
    classes = sorted(train)
    # Grey is kept only where every image is grey, which takes a look at all of them before the arrays are made.
    files = [file for part in parts.values() for of_class in part.values() for file in of_class]
    mode: Mode = "L" if _all_grey(tree, files) else "RGB"
    arrays = {}
    for part, by_class in parts.items():
        ordered = [file for name in classes for file in by_class[name]]
        arrays[f"x_{part}"] = stack(tree, ordered, mode=mode, text=f"reading {part} images", show=show)
        arrays[f"y_{part}"] = np.repeat(np.arange(len(classes)), [len(by_class[name]) for name in classes])
    return Dataset.from_arrays(**arrays, name=path.stem, classes=len(classes), class_names=tuple(classes))


def _root(names: list[str]) -> str | None:
    """Return what precedes ``train/`` and ``test/``: nothing, or the one folder that an archive wraps its files in."""
    roots: Mapping[str, set[str]] = {"train": set(), "test": set()}
    for name in names:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).suffix.lower() in SUFFIXES and len(parts) in (3, 4) and parts[-3] in roots:
            roots[parts[-3]].add("".join(f"{part}/" for part in parts[:-3]))
    return min(roots["train"] & roots["test"], key=len, default=None)


def _by_class(names: list[str], prefix: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        inner = PurePosixPath(name.removeprefix(prefix))
        if name.startswith(prefix) and len(inner.parts) == 2 and inner.suffix.lower() in SUFFIXES:
            found.setdefault(inner.parts[0], []).append(name)
    return found


def _all_grey(tree: Tree, files: list[str]) -> bool:
    for name, content in tree.read(files):
        where = f"{tree.path}/{name}"
        with damage_as_error(f"{where} is not a readable image"), _opened(content, where) as image:
            if image.mode not in {"1", "L", "LA"}:
                return False
    return True


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]} pixels"


def _some(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if shown else "none"
