"""Checkpoints: the whole state of a run in one safetensors file, and a small JSON note that names the valid one.

The checkpoint before the last one is kept too. If the last one turns out to be damaged, the run continues from there.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from feddpc._version import __version__
from feddpc.errors import RunFolderError
from feddpc.round.client_table import ClientTable
from feddpc.round.row_storage import SLOTS
from feddpc.round.state import Meter, RunState
from feddpc.runs.append_log import LogMark
from feddpc.storage import explain_os_errors, replace_file, replace_text, sync_folder

#: The format that is written and read.
FORMAT = 3
#: How the names of tensors begin that belong to ``RunState.watched``.
WATCHED = "watched/"
#: The names of the tensors that hold ``RunState.best`` and ``RunState.statistics``.
BEST, MEAN = "best", "statistics"
#: The notes of the last checkpoint and of the one before it.
NOTE, OLDER_NOTE = "checkpoint.json", "checkpoint.previous.json"


class OtherFormatError(RunFolderError):
    """The checkpoint was written by a version with another format."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: the round, how long the records were then, and the state."""

    round: int
    records: LogMark
    tensors: dict[str, Tensor]
    beside: dict[str, LogMark] = field(default_factory=dict)  #: of other files that grow, by name
    diverged: str | None = None  #: why the run must not go on
    meter: Meter = field(default_factory=Meter)
    older: bool = False  #: whether it is the one before the last, which is damaged


def save(
    folder: Path,
    state: RunState,
    records: LogMark,
    diverged: str | None = None,
    beside: Mapping[str, LogMark] | None = None,
) -> None:
    """Write the state after ``state.round``; the previous checkpoint stays valid, and is kept as a fallback.

    ``records`` and the marks of files ``beside`` them say how much of these is on the disk, and belongs to the state.

    Memories on disk bring their rows there when they export; the checkpoint says where.
    """
    index, older = folder / NOTE, folder / OLDER_NOTE
    with explain_os_errors(folder):
        folder.mkdir(exist_ok=True)
        if not index.exists():
            sync_folder(folder.parent)  # the folder's own name must be on the disk too
            _write_note(index, {"round": 0, "file": None})  # so that a state without a note is never a beginning
    tensors = {"w": state.w} | {f"server.{k}": v for k, v in state.server.items()}
    tensors |= {f"{WATCHED}{k}": v for k, v in state.watched.items()}
    tensors |= {name: t for name, t in ((BEST, state.best), (MEAN, state.statistics)) if t is not None}
    memories = {"slots": state.slots, "clients": state.clients}
    for kind, memory in memories.items():
        ids, table = memory.export()
        tensors |= {f"{kind}/ids": ids} | {f"{kind}.{k}": v for k, v in table.items()}
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    name = f"round-{state.round:07d}.safetensors"
    replace_file(folder / name, lambda path: save_file(tensors, path))
    note = {
        "round": state.round,
        "record_bytes": records.size,
        "record_sha256": records.sha256,
        "beside": beside or {},
        "file": name,
        "sha256": _digest(folder / name),
        "diverged": diverged,
        "meter": asdict(state.meter),
    }
    before = _read_note(index)
    if before is not None and before["file"] != name:  # a note that is damaged, or of this round, is no fallback
        replace_text(older, json.dumps(before, indent=1) + "\n")
    _write_note(index, note)
    for memory in memories.values():
        memory.committed()
    rows = {f"{kind}.rows" for kind in memories if f"{kind}.{SLOTS}" in tensors}
    kept = {name, (_read_note(older) or {}).get("file"), *rows}
    with explain_os_errors(folder):
        unused = [p for p in (*folder.glob("round-*.safetensors"), *folder.glob("*.rows")) if p.name not in kept]
        if any(path.suffix == ".rows" for path in unused):  # the older checkpoint is nothing without its rows
            older.unlink(missing_ok=True)
        for path in unused:
            path.unlink(missing_ok=True)


def load(folder: Path) -> Saved | None:
    """Return the last complete checkpoint, None if there is none yet.

    If it is damaged, return the one before it, with a warning; if both are, raise an error.
    """
    try:
        return _load(folder, folder / NOTE)
    except OtherFormatError:
        raise
    except RunFolderError as error:
        try:
            saved = _load(folder, folder / OLDER_NOTE) if (folder / OLDER_NOTE).exists() else None
        except RunFolderError:
            saved = None
        if saved is None:
            raise
        warnings.warn(f"{error}. Continuing from the checkpoint before it, of round {saved.round}", stacklevel=2)
        return replace(saved, older=True)


def adopt(folder: Path, saved: Saved) -> None:
    """Continue from ``saved``, after all checks: it is the last checkpoint from now on, and any fallback is sound."""
    with explain_os_errors(folder):
        if saved.older:
            replace_text(folder / NOTE, (folder / OLDER_NOTE).read_text(encoding="utf-8"))
        if any(key.endswith(f".{SLOTS}") for key in saved.tensors):
            # Rows on disk that only the older checkpoint needs may be overwritten.
            (folder / OLDER_NOTE).unlink(missing_ok=True)


def _load(folder: Path, index: Path) -> Saved | None:
    if not index.exists():
        if any(folder.glob("round-*.safetensors")):
            raise RunFolderError(
                f"{index} is missing, so it is not known which of the files next to it is valid: restore it, or remove "
                f"{folder} to compute all rounds again"
            )
        return None
    try:
        note = json.loads(index.read_text(encoding="utf-8"))
        if note["format"] != FORMAT:
            raise OtherFormatError(
                f"{index} has format {note['format']}, written by feddpc {note.get('feddpc', '(unknown)')}; feddpc "
                f"{__version__} reads format {FORMAT}: continue this run with its own version"
            )
        if _note_digest(note) != note["note_sha256"]:
            raise _damaged(index)
        if note["file"] is None:
            return None
        path = folder / Path(note["file"]).name
        if _digest(path) != note["sha256"]:
            raise _damaged(path)
        return Saved(
            int(note["round"]),
            LogMark(int(note["record_bytes"]), note["record_sha256"]),
            load_file(path),
            {name: LogMark(int(size), sha256) for name, (size, sha256) in note.get("beside", {}).items()},
            note["diverged"],
            Meter(**note["meter"]),
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise RunFolderError(
            f"the checkpoint in {folder} cannot be read: {error}; restore it, or start a new run"
        ) from None


def restore(saved: Saved, state: RunState) -> None:
    """Put a checkpoint's tensors into a fresh ``state`` of the same method and model."""
    try:
        fresh = {"w": state.w} | {f"server.{k}": v for k, v in state.server.items()}
        for key, tensor in fresh.items():
            if saved.tensors[key].shape != tensor.shape:
                raise RunFolderError(
                    f"the checkpoint's {key} has shape {tuple(saved.tensors[key].shape)}, not {tuple(tensor.shape)}"
                )
        # Copies: what a file gives may lie at odd addresses, where vectorised sums add in another order.
        placed = {k: saved.tensors[k].to(v.device, v.dtype, copy=True) for k, v in fresh.items()}
        if BEST in saved.tensors:
            extra = 0 if state.statistics is None else len(state.statistics)
            state.best = placed_like(saved.tensors[BEST], state.w).view(len(state.w) + extra)
        if state.statistics is not None:
            state.statistics = placed_like(saved.tensors[MEAN], state.w).view_as(state.statistics)
        _restore_memory(saved, "slots", state.slots)
        _restore_memory(saved, "clients", state.clients)
    except KeyError as error:
        raise RunFolderError(f"the checkpoint lacks {error}: it belongs to another method") from None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise RunFolderError(f"the checkpoint cannot be used: {error}; restore it or start a new run") from None
    state.w = placed["w"]
    state.server = {k: placed[f"server.{k}"] for k in state.server}
    watched = {k.removeprefix(WATCHED): v for k, v in saved.tensors.items() if k.startswith(WATCHED)}
    state.watched = {k: v.to(state.w.device, copy=True) for k, v in watched.items()}
    state.round, state.meter = saved.round, saved.meter


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy on the device, and in the type, of ``like``."""
    return tensor.to(like.device, like.dtype, copy=True)


def _restore_memory(saved: Saved, kind: str, memory: ClientTable) -> None:
    table = {k.removeprefix(f"{kind}."): v for k, v in saved.tensors.items() if k.startswith(f"{kind}.")}
    memory.restore(saved.tensors[f"{kind}/ids"], table)


def _damaged(path: Path) -> RunFolderError:
    return RunFolderError(f"{path} does not match its checksum: it was damaged; restore it or start a new run")


def _read_note(path: Path) -> dict[str, Any] | None:
    """Return a note that names a file of states and matches its checksum, else None."""
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        good = isinstance(note["file"], str) and _note_digest(note) == note["note_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return note if good else None


def _write_note(index: Path, note: dict[str, Any]) -> None:
    note = {"format": FORMAT, "feddpc": __version__, **note}
    replace_text(index, json.dumps(note | {"note_sha256": _note_digest(note)}, indent=1) + "\n")


def _note_digest(note: dict[str, Any]) -> str:
    """Return a digest of what the note says but for the digest itself."""
    text = json.dumps({k: v for k, v in note.items() if k != "note_sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def load_model(path: Path) -> dict[str, Tensor]:
    """Read what :func:`save_model` wrote, or a file of another program, which has no checksum."""
    try:
        with safe_open(path, "pt") as file:
            expected = (file.metadata() or {}).get("sha256")
            # Copies: see restore.
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- it is no dict
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None
    if expected is not None and expected != _tensor_digest(found):
        raise _damaged(path)
    return found


def save_model(path: Path, state_dict: dict[str, Tensor]) -> None:
    """Write a model's state_dict as safetensors, with a checksum of the numbers."""
    tensors = {k: v.contiguous() for k, v in state_dict.items()}
    about = {"sha256": _tensor_digest(tensors)}  # one entry: safetensors writes several in any order
    replace_file(path, lambda temporary: save_file(tensors, temporary, metadata=about))


def _tensor_digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
