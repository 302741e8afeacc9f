"""Shakespeare's plays as a federation: one client per speaking role, who learns to predict the next character.

A line ``NAME:`` after an empty line begins a speech. All speeches of a role, in order and each with its last line
break, are the client's text. The first 80 % of it are for training and the rest for testing. Both parts are cut into
sequences of 80 characters; the targets are the same characters shifted by one. A last, shorter sequence is padded with
character 0, and its targets with -100, which no loss counts. Roles with fewer than 1,000 characters are left out, so
141 of 299 remain. The vocabulary is the set of all characters in the file, sorted; ``class_names`` holds it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from feddpc.data.array_checks import IGNORED, Array
from feddpc.data.dataset import Dataset
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.specs import Spec
from feddpc.data.untrusted import MAX_FILE_BYTES, decoding_errors
from feddpc.errors import DataError

LENGTH = 80
MIN_CHARACTERS = 1000
_FILE = "input.txt"


def decode(spec: Spec, path: Path) -> Dataset:
    """Read the official text file, or a folder or an archive that holds it as ``input.txt``."""
    with decoding_errors(f"{path} is not a text in UTF-8: get {_FILE} again"):
        text = _read(path).decode("utf-8").replace("\r\n", "\n")
    characters = sorted(set(text))
    roles = {name: said for name, said in sorted(speeches(text).items()) if len(said) >= MIN_CHARACTERS}
    if not roles:
        raise DataError(
            f"{path} has no role with {MIN_CHARACTERS} characters: speeches begin with a line NAME: after an empty line"
        )
    if len(characters) != spec.classes:
        raise DataError(
            f"{path} has {len(characters)} different characters, but the real text has {spec.classes}: it is "
            f"incomplete or another text; get {_FILE} again"
        )
    code = {character: number for number, character in enumerate(characters)}
    parts: dict[str, list[Array]] = {"x_train": [], "y_train": [], "x_test": [], "y_test": []}
    for said in roles.values():
        codes = np.array([code[character] for character in said], np.int64)
        split = len(codes) - max(2, round(0.2 * len(codes)))
        for part, piece in (("train", codes[:split]), ("test", codes[split:])):
            x, y = sequences(piece)
            parts[f"x_{part}"].append(x)
            parts[f"y_{part}"].append(y)
    owners = np.repeat(list(roles), [len(x) for x in parts["x_train"]])
    arrays = {field: np.concatenate(pieces) for field, pieces in parts.items()}
    return replace(spec, class_names=tuple(characters)).dataset(**arrays, client_ids=owners)


def speeches(text: str) -> dict[str, str]:
    """Return the text of each role.

    >>> speeches("ANN:\\nHello!\\n\\nBOB:\\nHi:\\nyou.\\n\\nANN:\\nBye.")
    {'ANN': 'Hello!\\nBye.\\n', 'BOB': 'Hi:\\nyou.\\n'}
    """
    roles: dict[str, str] = {}
    name = None
    for block in text.split("\n\n"):
        first, _, rest = block.strip("\n").partition("\n")
        if first.endswith(":"):
            name, block = first.removesuffix(":"), rest
        if name is not None and block.strip():
            roles[name] = roles.get(name, "") + block.strip("\n") + "\n"
    return roles


def sequences(codes: Array) -> tuple[Array, Array]:
    """Cut a text into sequences, and return them with their targets; it needs at least two characters.

    >>> x, y = sequences(np.arange(83))
    >>> x.shape, x[1, :3].tolist(), y[0, -1], y[1, :3].tolist()
    ((2, 80), [80, 81, 0], np.int64(80), [81, 82, -100])
    """
    rows = -(-(len(codes) - 1) // LENGTH)
    x, y = np.zeros(rows * LENGTH, np.int64), np.full(rows * LENGTH, IGNORED, np.int64)
    x[: len(codes) - 1], y[: len(codes) - 1] = codes[:-1], codes[1:]
    return x.reshape(rows, LENGTH), y.reshape(rows, LENGTH)


def _read(path: Path) -> bytes:
    if path.is_file() and path.suffix == ".txt":
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} has {path.stat().st_size} bytes, more than any file of a data set: refused")
        return path.read_bytes()
    names = [name for name in list_files(path) if PurePosixPath(name).name == _FILE]
    if len(names) != 1:
        raise DataError(f"{path} holds {len(names)} files {_FILE}: give the file itself")
    return next(content for _, content in read_files(path, names))
