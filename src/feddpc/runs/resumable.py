"""The check before something is resumed: what the folder holds instead, and which folder was probably meant."""

from __future__ import annotations

import difflib
from pathlib import Path

from feddpc.errors import RunFolderError
from feddpc.runs.record import is_blank
from feddpc.storage import explain_os_errors

#: What can be resumed, and the files or folders by which it is known: one of them must be there.
MARKS = {
    "run": ("config.toml",),
    "comparison": ("compare.json",),
    "demo": ("app", "run", "keys", "server"),
}
COMMANDS = {"run": "feddpc run", "comparison": "feddpc compare"}


def check_resumable(out: Path, kind: str = "run") -> None:
    """Raise unless ``out`` holds a ``kind`` to resume; say what is there instead and what to type."""
    with explain_os_errors(out):
        if _is(out, kind):
            return
        contents, meant, blank = _contents(out, kind), _meant(out, kind), is_blank(out)
    hint = f"Did you mean {' or '.join(map(str, meant))}? " if meant else ""
    start = "leave out --resume (in Python: resume=True)" if blank else "choose another --out and leave out --resume"
    raise RunFolderError(f"nothing to resume: {contents}. {hint}To start a new {kind}, {start}")


def _is(folder: Path, kind: str) -> bool:
    return any((folder / mark).exists() for mark in MARKS[kind])


def _contents(out: Path, kind: str) -> str:
    if not out.exists():
        return f"there is no folder {out}"
    if not out.is_dir():
        return f"{out} is a file, not a folder"
    if not any(out.iterdir()):
        return f"{out} is an empty folder"
    for other, command in COMMANDS.items():
        if other != kind and _is(out, other):
            return f"{out} holds a {other}, which `{command} --resume --out {out}` continues"
    if is_blank(out):
        return f"the run in {out} was stopped before its settings were saved"
    return f"{out} holds no {kind}: it has no {' or '.join(MARKS[kind])}"


def _meant(out: Path, kind: str, most: int = 3) -> list[Path]:
    """Return folders of the ``kind`` inside ``out``, or else next to it with similar names."""
    if out.is_dir() and (inside := sorted(path for path in out.iterdir() if _is(path, kind))):
        return inside[:most]
    if not out.parent.is_dir():
        return []
    names = [path.name for path in out.parent.iterdir() if path != out]
    near = difflib.get_close_matches(out.name, names, n=10)
    return [path for name in near if _is(path := out.parent / name, kind)][:most]
