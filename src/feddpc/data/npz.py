"""Data sets in one ``.npz`` file with the arrays x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.data.dataset import FIELDS, Dataset
from feddpc.data.npy import read_header
from feddpc.data.unpack_limits import check_unpacked_size, decoding_errors
from feddpc.errors import DataError


def decode(path: Path) -> Dataset:
    """Read ``path``. Object arrays are refused, because loading one runs code from the file."""
    with decoding_errors(f"{path} is not a readable .npz file of plain arrays"), zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        check_unpacked_size(path, path.stat().st_size, sum(member.file_size for member in members.values()))
        missing = [field for field in FIELDS if field not in members]
        if missing:
            present = ", ".join(members) or "nothing"
            raise DataError(f"{path} lacks {', '.join(missing)} (it holds {present}): save all of {', '.join(FIELDS)}")
        arrays = {field: _read_array(archive, members[field]) for field in FIELDS}
        return Dataset.from_arrays(**arrays, name=path.stem)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    """Read one array, after checking that it has the size that its header claims."""
    with archive.open(member) as stream:
        header = read_header(stream)
        if not header.fills(member.file_size - stream.tell()):
            raise ValueError(f"{member.filename} has {member.file_size} bytes, but its header claims {header}")
        values = np.frombuffer(stream.read(), header.dtype)
        return values.reshape(header.shape, order="F" if header.by_columns else "C").copy()
