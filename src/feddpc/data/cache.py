"""Decoded data sets on disk: one ``.npy`` file an array, and a JSON with their shapes and checksums.

A data set appears in the cache whole or not at all: it is written to a temporary folder beside its place, then renamed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.data.dataset import FIELDS, Array, Dataset, compact, md5
from feddpc.data.specs import Spec
from feddpc.errors import DataError
from feddpc.storage import sync_file
from feddpc.storage import sync_folder_now as sync_folder

FORMAT = 1
_JSON = "dataset.json"


def root(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache folder: ``cache``, else $FEDDPC_CACHE, else feddpc in the user's cache folder."""
    if cache is not None:
        return Path(cache)
    if own := os.environ.get("FEDDPC_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "feddpc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "feddpc"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "feddpc"
    return Path.home() / ".cache" / "feddpc"


def folder(name: str, cache: Path) -> Path:
    """Return where the data set ``name`` lies in the cache, whether or not it is there."""
    return cache / "datasets" / name


def holds(name: str, cache: Path) -> bool:
    """Whether the cache has an entry; it was on the disk before it was renamed into place, so it is complete."""
    return (folder(name, cache) / _JSON).is_file()


def store(data: Dataset, cache: Path) -> Path:
    """Write ``data`` to the cache in place of any older copy, and return its folder."""
    place = folder(data.name, cache)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{data.name}-", dir=place.parent, ignore_cleanup_errors=True
        ) as temporary:
            fresh = Path(temporary) / "new"
            fresh.mkdir()
            _write(data, fresh)
            for path in fresh.iterdir():
                sync_file(path)
            sync_folder(fresh)
            if place.exists():
                place.rename(Path(temporary) / "old")  # removed together with the temporary folder
            fresh.rename(place)
            sync_folder(place.parent)
    except OSError as error:
        needed = sum(getattr(data, field).nbytes for field in FIELDS) >> 20
        raise DataError(
            f"cannot write {data.name} to {place.parent} ({error.strerror or error}): it needs {needed + 1} MB there; "
            "free some space or set FEDDPC_CACHE to another folder"
        ) from error
    return place


def read(spec: Spec, cache: Path) -> Dataset:
    """Map the cached arrays into memory after a cheap check of format, shapes and file sizes."""
    place = folder(spec.name, cache)
    about = _about(spec, place)
    arrays = {field: _map(spec, place / f"{field}.npy", about["arrays"][field]) for field in FIELDS}
    try:
        names = about.get("class_names")
        data = Dataset(
            name=spec.name,
            x_train=arrays["x_train"],
            y_train=arrays["y_train"].astype(np.int64),
            x_test=arrays["x_test"],
            y_test=arrays["y_test"].astype(np.int64),
            classes=spec.classes,
            class_names=tuple(names) if names else None,
        )
        return spec.verify(data, checksums=False)
    except Exception as error:  # whatever was done to the files
        raise _damaged(spec, place, str(error)) from error


def recorded(spec: Spec, cache: Path) -> dict[str, str]:
    """Return the checksums that were recorded when ``spec`` was stored, by field."""
    about = _about(spec, folder(spec.name, cache))
    return {field: str(about["arrays"][field]["md5"]) for field in FIELDS}


def _write(data: Dataset, place: Path) -> None:
    arrays = {field: np.ascontiguousarray(compact(getattr(data, field))) for field in FIELDS}
    for field, array in arrays.items():
        write_array(place / f"{field}.npy", array)
    about = {
        "format": FORMAT,
        "name": data.name,
        "classes": data.classes,
        "class_names": data.class_names,
        "arrays": {
            field: {"shape": array.shape, "dtype": str(array.dtype), "md5": md5(array)}
            for field, array in arrays.items()
        },
    }
    (place / _JSON).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def write_array(path: Path, array: Array) -> None:
    """Write one ``.npy`` file; unlike ``np.save``, a full disk is reported by the system's own error."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def _about(spec: Spec, place: Path) -> dict[str, Any]:
    try:
        about = json.loads((place / _JSON).read_text(encoding="utf-8"))
        whole = about["format"] == FORMAT and all(
            {"shape", "dtype", "md5"} <= about["arrays"][field].keys() for field in FIELDS
        )
    except Exception as error:  # whatever was done to the file
        raise _damaged(spec, place / _JSON, str(error)) from error
    if not whole:
        raise _damaged(spec, place / _JSON, "it was written by another version")
    return dict(about)


def _map(spec: Spec, path: Path, about: dict[str, Any]) -> Array:
    try:
        # Copy-on-write: nothing is read before it is used, and a caller's change never reaches the file.
        array = np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))
    except Exception as error:  # whatever was done to the file
        raise _damaged(spec, path, str(error)) from error
    if list(array.shape) != about["shape"] or str(array.dtype) != about["dtype"]:
        raise _damaged(spec, path, f"it holds {array.dtype} {array.shape}")
    return array


def _damaged(spec: Spec, path: Path, why: str) -> DataError:
    return DataError(f"the cached {path} is damaged ({why}): run `feddpc data get {spec.name} --again`")
