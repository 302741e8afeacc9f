"""``feddpc federate init``: writes a complete Flower app, to be changed for your own model and data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from feddpc.errors import BadInputError
from feddpc.storage import explain_os_errors

#: Templates are stored as text, so that no tool treats them as part of this package.
SUFFIX = ".txt"


def write(folder: Path) -> list[Path]:
    """Write the app into a new or empty folder, which gives it its name, and return its files."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "app"
    with explain_os_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInputError(f"{folder} exists and is not an empty folder: choose another one")
        paths = []
        for path, text in _templates(files("feddpc.federate") / "template", PurePosixPath()):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("$name", name), encoding="utf-8")
            paths.append(target)
    return paths


def _templates(place: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(place.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            yield from _templates(entry, path / entry.name)
        elif entry.name.endswith(SUFFIX):
            yield path / entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")
