"""The IDX format of MNIST and Fashion-MNIST: a big-endian header, then raw bytes, gzipped or plain."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path, PurePosixPath

import numpy as np

from feddpc.data.array_checks import Array
from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.specs import Spec
from feddpc.data.untrusted import MAX_FILE_BYTES, decoding_errors, max_unpacked_bytes
from feddpc.errors import DataError

# "train-images-idx3-ubyte", or with a dot as some mirrors write it; either may end in .gz
_FILE = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_FIELDS = {
    ("train", "images"): "x_train",
    ("train", "labels"): "y_train",
    ("t10k", "images"): "x_test",
    ("t10k", "labels"): "y_test",
}


def decode(spec: Spec, path: Path) -> Dataset:
    """Read ``spec`` from four IDX files in a folder or an archive."""
    by_field = _by_field(list_files(path))
    missing = [f"{part}-{what}" for (part, what), field in _FIELDS.items() if field not in by_field]
    if missing:
        raise DataError(f"{path} lacks the IDX files {', '.join(missing)} (names such as train-images-idx3-ubyte.gz)")
    contents = dict(read_files(path, by_field.values()))
    arrays = {field: parse(contents[name], f"{path}/{name}") for field, name in by_field.items()}
    return spec.dataset(**arrays)


def parse(content: bytes, where: str) -> Array:
    """Return the uint8 array of an IDX file; ``where`` names the file in messages."""
    if content[:2] == b"\x1f\x8b":
        with decoding_errors(f"{where} is damaged or truncated: get it again"):
            content = _gunzip(content, where)
    if content[:3] != b"\x00\x00\x08" or len(content) < 4:
        raise DataError(f"{where} is not an IDX file of bytes: it starts with {content[:4].hex() or 'nothing'}")
    with decoding_errors(f"{where} does not hold what its header says: get it again"):
        start = 4 + 4 * content[3]
        shape = struct.unpack(f">{content[3]}I", content[4:start])
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _gunzip(content: bytes, where: str) -> bytes:
    """Unpack a gzipped file, up to the size that a real one can have."""
    unpacker = zlib.decompressobj(wbits=31)  # gzip, with its checksum
    unpacked = unpacker.decompress(content, min(MAX_FILE_BYTES, max_unpacked_bytes(len(content))))
    if not unpacker.eof or unpacker.unused_data:
        raise DataError(f"{where} is truncated, or unpacks to more than an IDX file of its size can hold: get it again")
    return unpacked


def _by_field(names: list[str]) -> dict[str, str]:
    """Return the file of each array; a file near the root wins, and a plain file wins over a gzipped one."""
    by_field: dict[str, str] = {}
    for name in sorted(names, key=lambda n: (n.count("/"), len(n), n)):
        match = _FILE.fullmatch(PurePosixPath(name).name)
        if match and name.count("/") <= 2:
            by_field.setdefault(_FIELDS[match[1], match[2]], name)
    return by_field
