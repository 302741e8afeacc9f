"""Data sets in one ``.npz`` file with the arrays x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from feddpc.data.dataset import FIELDS, Dataset
from feddpc.data.npy import read_header
from feddpc.data.unpack_limits import check_unpacked_size, decoding_errors
from feddpc.errors import DataError


def decode(path: Path) -> Dataset:
    """Read ``path``. Object arrays are refused, because loading one runs code from the file."""
    with decoding_errors(f"{path} is not a readable .npz file of plain arrays"):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_unpacked_size(path, path.stat().st_size, sum(member.file_size for member in members))
            for member in members:
                _check_header(archive, member)
        # Opened here, because np.load leaks its own handle when the file is damaged.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [field for field in FIELDS if field not in file]
            if missing:
                present = ", ".join(file.files) or "nothing"
                raise DataError(
                    f"{path} lacks {', '.join(missing)} (it holds {present}): save all of {', '.join(FIELDS)}"
                )
            arrays = {field: file[field] for field in FIELDS}
        return Dataset.from_arrays(**arrays, name=path.stem)


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header claims another size than it has: memory is allocated for what it claims."""
    with archive.open(member) as opened:
        header = read_header(opened)
        if not header.dtype.hasobject and not header.fills(member.file_size - opened.tell()):
            raise DataError(f"{member.filename} has {member.file_size} bytes, but its header claims {header.shape}")
