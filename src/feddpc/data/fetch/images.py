"""Decode image files to arrays, and folders of image files to data sets."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.fetch.download import progress_bar
from feddpc.data.untrusted import check_unpacked_size, decoding_errors
from feddpc.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

#: Formats to try, whatever a file is called: Pillow knows many others, and some of them start other programs.
FORMATS = ("PNG", "JPEG")
#: Images of data sets have far fewer pixels; a sheet of ten thousand small images has ten million.
MAX_PIXELS = 1 << 24
_EIGHT_BIT = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
# Nothing before train/ and test/, or the one folder that an archive wraps its files in.
_FILE = re.compile(r"(?P<root>[^/]+/)?(?P<part>train|test)/(?P<label>[^/]+)/[^/]+(?i:\.png|\.jpe?g)")
Mode = Literal["L", "RGB"]


def pixels(content: bytes, where: str, mode: Mode) -> Array:
    """Decode one 8-bit image to uint8 ``[height, width, 1 or 3]``, gray or RGB as ``mode`` says."""
    with decoding_errors(f"{where} is not a readable image"), _open_image(content, where) as image:
        if image.mode not in _EIGHT_BIT:
            raise DataError(f"{where} has the pixel type {image.mode}: only 8-bit images are read; convert it")
        # Pillow warns when the transparency of a palette is dropped in one step.
        opaque = image.convert("RGBA") if "transparency" in image.info else image
        array = np.asarray(opaque.convert(mode))
    return array[..., None] if array.ndim == 2 else array


def stack(path: Path, names: list[str], *, mode: Mode, text: str) -> Array:
    """Decode the named files into one array, in the given order; all must have the size of the first."""
    index = {name: i for i, name in enumerate(names)}
    out: Array | None = None
    first, packed, unpacked = "", 0, 0
    with progress_bar(text, len(names)) as advance:
        for name, content in read_files(path, names):
            image = pixels(content, f"{path}/{name}", mode)
            if out is None:
                with decoding_errors(f"{path}: {len(names)} images of {_size(image)} do not fit in memory"):
                    out, first = np.empty((len(names), *image.shape), np.uint8), name
            if image.shape != out.shape[1:]:
                raise DataError(
                    f"{path}/{name} is {_size(image)} but {first} is {_size(out[0])}: all images must have one size; "
                    "resize them"
                )
            packed, unpacked = packed + len(content), unpacked + image.nbytes
            check_unpacked_size(f"{path} with its images", packed, unpacked)
            out[index[name]] = image
            advance(1)
    if out is None:
        raise DataError(f"{path} has no images to read")
    return out


def decode(path: Path) -> Dataset:
    """Read ``train/CLASS/*.png|jpg|jpeg`` and ``test/CLASS/...``; classes are numbered in sorted order."""
    parts = _layout(list_files(path))
    if parts is None:
        raise DataError(
            f"{path} has no images under train/CLASS/ and test/CLASS/: give a folder or zip with this layout or an "
            ".npz; to use the official files of a known data set, run `feddpc data get NAME --from PATH` once"
        )
    train, test = set(parts["train"]), set(parts["test"])
    if train != test:
        raise DataError(
            f"{path}: train/ and test/ must hold the same classes; only in train: {_first_five(train - test)}; "
            f"only in test: {_first_five(test - train)}"
        )
    classes = sorted(train)
    files = {part: [file for name in classes for file in parts[part][name]] for part in parts}
    # Images stay gray only if all of them are, so all are inspected before the arrays are made.
    mode: Mode = "L" if _all_gray(path, files["train"] + files["test"]) else "RGB"
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = stack(path, files[part], mode=mode, text=f"reading {part} images")
        arrays[f"y_{part}"] = np.repeat(np.arange(len(classes)), [len(parts[part][name]) for name in classes])
    return Dataset.from_arrays(**arrays, name=path.stem, classes=len(classes), class_names=tuple(classes))


def _layout(names: list[str]) -> dict[str, dict[str, list[str]]] | None:
    """Return the image files by part and class, or None if the names have another layout."""
    roots: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name in names:
        if match := _FILE.fullmatch(name):
            parts = roots.setdefault(match["root"] or "", {})
            parts.setdefault(match["part"], {}).setdefault(match["label"], []).append(name)
    return next((parts for _, parts in sorted(roots.items()) if len(parts) == 2), None)


def _open_image(content: bytes, where: str) -> Image.Image:
    from PIL import Image

    image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"{where} has {image.width}x{image.height} pixels, more than {MAX_PIXELS}: make it smaller")
    return image


def _all_gray(path: Path, files: list[str]) -> bool:
    for name, content in read_files(path, files):
        with decoding_errors(f"{path}/{name} is not a readable image"), _open_image(content, name) as image:
            if image.mode not in {"1", "L", "LA"}:
                return False
    return True


def _size(image: Array) -> str:
    return f"{image.shape[1]}x{image.shape[0]} pixels"


def _first_five(names: set[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more or "none"
