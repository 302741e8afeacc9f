"""The IDX format of MNIST and Fashion-MNIST: a big-endian header, then raw bytes; gzipped or plain."""

from __future__ import annotations

import gzip
import io
import re
import struct
from pathlib import Path, PurePosixPath

import numpy as np

from feddpc.data.dataset import FIELDS, Array, Dataset
from feddpc.data.limits import LARGEST_MEMBER, check_growth, damage_as_error
from feddpc.data.tree import open_tree
from feddpc.errors import DataError

# "train-images-idx3-ubyte", or with a dot as some mirrors spell it; either may end in .gz
_FILE = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_WANTED = {
    ("train", "images"): "x_train",
    ("train", "labels"): "y_train",
    ("t10k", "images"): "x_test",
    ("t10k", "labels"): "y_test",
}


def fits(names: list[str]) -> bool:
    """Whether these file names are a set of IDX files."""
    return len(_fields(names)) == len(_WANTED)


def is_one_of_the_files(path: Path) -> bool:
    """Whether ``path`` is itself an IDX file, which stands for the folder that holds the set."""
    return path.is_file() and _FILE.fullmatch(path.name) is not None


def decode(path: Path) -> Dataset:
    """Read the four IDX files of a folder or an archive; one of the four files stands for its folder."""
    if is_one_of_the_files(path):
        path = path.parent
    tree = open_tree(path)
    fields = _fields(tree.names())
    missing = [f"{part}-{what}" for (part, what), field in _WANTED.items() if field not in fields]
    if missing:
        raise DataError(f"{path} lacks the IDX files {', '.join(missing)} (names such as train-images-idx3-ubyte.gz)")
    by_name = {name: field for field, name in fields.items()}
    arrays = {by_name[name]: parse(content, f"{path}/{name}") for name, content in tree.read(list(by_name))}
    x_train, y_train, x_test, y_test = (arrays[field] for field in FIELDS)
    return Dataset.from_arrays(x_train, y_train, x_test, y_test, name=path.name)


def parse(content: bytes, where: str) -> Array:
    """Return the uint8 array that an IDX file holds; ``where`` names the file in messages."""
    if content[:2] == b"\x1f\x8b":
        with damage_as_error(f"{where} is damaged or truncated: get it again"):
            content = _unzipped(content, where)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{where} is not an IDX file of bytes: it starts with {content[:4].hex() or 'nothing'}")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise DataError(f"{where} ends inside its header: get it again")
    shape = struct.unpack(f">{rank}I", content[4:start])
    expected = int(np.prod(shape, dtype=object))
    if len(content) - start != expected:
        raise DataError(f"{where} holds {len(content) - start} values where its header says {expected}: get it again")
    with damage_as_error(f"{where} says that it has the shape {shape[:9]}: get it again"):
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _unzipped(content: bytes, where: str) -> bytes:
    """Unpack a gzipped file piece by piece, as far as a real one can go."""
    found = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        while piece := stream.read(1 << 20):
            found += piece
            check_growth(where, len(content), len(found))
            if len(found) > LARGEST_MEMBER:
                raise DataError(f"{where} unpacks to more than {LARGEST_MEMBER} bytes: refused")
    return bytes(found)


def _fields(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    # Shallow names first, and a plain file before its gzipped twin.
    for name in sorted(names, key=lambda n: (n.count("/"), len(n), n)):
        match = _FILE.fullmatch(PurePosixPath(name).name)
        if match and name.count("/") <= 2:
            found.setdefault(_WANTED[match[1], match[2]], name)
    return found
