"""Decoded data sets on disk: one ``.npy`` file per array, and a JSON file with their checksums.

A data set is written to a temporary folder and then renamed, so the cache holds a complete copy or none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import FIELDS, Dataset, md5
from feddpc.data.specs import Spec
from feddpc.errors import DataError
from feddpc.storage import sync_file, sync_folder

FORMAT = 2
_JSON = "dataset.json"


def cache_root(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache folder: ``cache``, else $FEDDPC_CACHE, else feddpc in the user's cache folder."""
    if given := cache or os.environ.get("FEDDPC_CACHE"):
        return Path(given).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "feddpc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "feddpc"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "feddpc"


def folder(name: str, cache: Path) -> Path:
    """Return the folder of the data set ``name`` in the cache, whether or not it exists."""
    return cache / "datasets" / name


def is_cached(name: str, cache: Path) -> bool:
    """Whether the cache has a copy of the data set ``name``; :func:`read` checks it."""
    return (folder(name, cache) / _JSON).is_file()


def write(data: Dataset, cache: Path) -> Path:
    """Write ``data`` to the cache, replace any older copy, and return its folder."""
    place = folder(data.name, cache)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{data.name}-", dir=place.parent, ignore_cleanup_errors=True
        ) as temporary:
            fresh = Path(temporary) / "new"
            fresh.mkdir()
            for field in data.stored_fields:
                write_array(fresh / f"{field}.npy", data.stored(field))
            about = {"format": FORMAT, "class_names": data.class_names, "md5": data.checksums()}
            (fresh / _JSON).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            for path in fresh.iterdir():
                sync_file(path)
            sync_folder(fresh)
            if place.exists():
                place.rename(Path(temporary) / "old")  # removed together with the temporary folder
            fresh.rename(place)
            sync_folder(place.parent)
    except OSError as error:
        needed = sum(getattr(data, field).nbytes for field in data.stored_fields) >> 20
        raise DataError(
            f"cannot write {data.name} to {place.parent} ({error.strerror or error}): it needs {needed + 1} MB there; "
            "free some space or set FEDDPC_CACHE to another folder"
        ) from error
    return place


def write_array(path: Path, array: Array) -> None:
    """Write one ``.npy`` file. Unlike ``np.save``, a full disk raises the operating system's own error."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def read(spec: Spec, cache: Path, *, checksums: bool = False) -> Dataset:
    """Map the cached arrays into memory. Format, shapes and labels are always checked, ``checksums`` on request."""
    place = folder(spec.name, cache)
    try:
        about = json.loads((place / _JSON).read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, but this version reads {FORMAT}")
        names = about["class_names"]
        if names is not None and [type(name) for name in names] != [str] * spec.classes:
            raise ValueError(f"class_names are not {spec.classes} names")
        # Copy-on-write: nothing is read before it is used, and changes by a caller never reach the file.
        fields = FIELDS if spec.clients is None else (*FIELDS, "client_ids")
        arrays: dict[str, Any] = {
            f: np.asarray(np.load(place / f"{f}.npy", mmap_mode="c", allow_pickle=False)) for f in fields
        }
        for field, array in arrays.items() if checksums else ():
            if (actual := md5(array)) != about["md5"][field]:
                raise ValueError(f"the md5 of {field} is {actual}, but {about['md5'][field]} was stored")
        for field in ("y_train", "y_test"):
            arrays[field] = arrays[field].astype(np.int64, casting="safe")
        class_names = names and tuple(names)
        data = Dataset(spec.name, **arrays, classes=spec.classes, class_names=class_names, target=spec.target)
        return spec.verify(data, checksums=checksums)
    except Exception as error:  # a damaged file can fail in almost any way
        raise DataError(
            f"the cached copy {place} is damaged or from another version ({error}): run `{spec.command} --force`"
        ) from error
