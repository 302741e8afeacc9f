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
from feddpc.methods.base import State
from feddpc.ranks import ALONE, Ranks
from feddpc.round.client_table import ClientTable
from feddpc.round.placement import Placement, part_of
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
    ranks: int = 1  #: how many processes wrote it
    shards: dict[int, dict[str, Tensor]] = field(default_factory=dict)  #: memories of clients, of ranks above 0


def save(
    folder: Path,
    state: RunState,
    records: LogMark,
    diverged: str | None = None,
    beside: Mapping[str, LogMark] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write the state after ``state.round``; the previous checkpoint stays valid, and is kept as a fallback.

    ``records`` and the marks of files ``beside`` them say how much of these is on the disk, and belongs to the state.

    Memories on disk bring their rows there when they export; the checkpoint says where. Of several ranks, each writes
    the memories that it has, and rank 0 the rest, at last the note that names all files.
    """
    with ranks.together("writing a checkpoint"):
        if not ranks.rank:
            _begin(folder)
    with ranks.together("writing a checkpoint"):
        shard = _save_shard(folder, state, ranks) if ranks.rank else None
    shards = [shard for shard in ranks.gather(shard) if shard is not None]
    with ranks.together("writing a checkpoint"):
        if not ranks.rank:
            _save(folder, state, records, diverged, beside or {}, shards, ranks)
    for memory in (state.slots, state.clients):
        memory.committed()


def _begin(folder: Path) -> None:
    """Make the folder, and before anything else a note in it, so that a state without a note is never a beginning."""
    with explain_os_errors(folder):
        folder.mkdir(exist_ok=True)
        if not (folder / NOTE).exists():
            sync_folder(folder.parent)  # the folder's own name must be on the disk too
            _write_note(folder / NOTE, {"round": 0, "file": None})


def _memories(state: RunState) -> dict[str, Tensor]:
    """Return what this process remembers of clients, by the names of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for kind, memory in (("slots", state.slots), ("clients", state.clients)):
        ids, table = memory.export()
        tensors |= {f"{kind}/ids": ids} | {f"{kind}.{k}": v for k, v in table.items()}
    return tensors


def _save_shard(folder: Path, state: RunState, ranks: Ranks) -> dict[str, Any] | None:
    """Write the memories of a rank above 0; return what the note says of them."""
    if not (state.slots or state.clients):
        return None
    tensors = _in_host_memory(_memories(state))
    name = f"round-{state.round:07d}{part_of(ranks.rank, ranks.size)}.safetensors"
    replace_file(folder / name, lambda path: save_file(tensors, path))
    return {"rank": ranks.rank, "file": name, "sha256": _digest(folder / name), "rows": _row_files(tensors, ranks)}


def _in_host_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _row_files(tensors: dict[str, Tensor], ranks: Ranks) -> list[str]:
    """Return the files with rows that some tensors refer to."""
    place = Placement(part=part_of(ranks.rank, ranks.size))
    return [place.file_name(kind) for kind in ("slots", "clients") if f"{kind}.{SLOTS}" in tensors]


def _save(
    folder: Path,
    state: RunState,
    records: LogMark,
    diverged: str | None,
    beside: Mapping[str, LogMark],
    shards: list[dict[str, Any]],
    ranks: Ranks,
) -> None:
    """Write the state without the memories of other ranks, and the note that names all files."""
    index, older = folder / NOTE, folder / OLDER_NOTE
    tensors = {"w": state.w} | {f"server.{k}": v for k, v in state.server.items()}
    tensors |= {f"{WATCHED}{k}": v for k, v in state.watched.items()}
    tensors |= {name: t for name, t in ((BEST, state.best), (MEAN, state.statistics)) if t is not None}
    tensors = _in_host_memory(tensors | _memories(state))
    name = f"round-{state.round:07d}.safetensors"
    replace_file(folder / name, lambda path: save_file(tensors, path))
    rows = [*_row_files(tensors, ranks), *(file for shard in shards for file in shard["rows"])]
    note: dict[str, Any] = {
        "round": state.round,
        "record_bytes": records.size,
        "record_sha256": records.sha256,
        "beside": beside,
        "file": name,
        "sha256": _digest(folder / name),
        "diverged": diverged,
        "meter": asdict(state.meter),
    }
    note |= {"ranks": ranks.size, "shards": shards, "rows": rows} if ranks.size > 1 else {}
    before = _read_note(index)
    if before is not None and before["file"] != name:  # a note that is damaged, or of this round, is no fallback
        replace_text(older, json.dumps(before, indent=1) + "\n")
    _write_note(index, note)
    fallback = _read_note(older) or {}
    kept = {name, fallback.get("file"), *rows}
    kept |= {shard["file"] for shard in (*shards, *fallback.get("shards", ()))}
    with explain_os_errors(folder):
        unused = [p for p in (*folder.glob("round-*.safetensors"), *folder.glob("*.rows")) if p.name not in kept]
        if any(path.suffix == ".rows" for path in unused):  # the older checkpoint is nothing without its rows
            older.unlink(missing_ok=True)
        for path in unused:
            path.unlink(missing_ok=True)


def load(folder: Path, ranks: Ranks = ALONE) -> Saved | None:
    """Return the last complete checkpoint, None if there is none yet.

    If it is damaged, return the one before it, with a warning; if both are, raise an error. If it is damaged for one of
    several ranks, all of them take the one before it.
    """
    saved, error = _attempt(folder, folder / NOTE, ranks)
    why = next((text for text in ranks.gather(None if error is None else str(error)) if text), None)
    if why is None or isinstance(error, OtherFormatError):
        if error is not None:
            raise error
        return saved
    saved, _ = _attempt(folder, folder / OLDER_NOTE, ranks) if (folder / OLDER_NOTE).exists() else (None, None)
    if not all(ranks.gather(saved is not None)):
        raise error or RunFolderError(why)
    assert saved is not None
    if not ranks.rank:
        warnings.warn(f"{why}. Continuing from the checkpoint before it, of round {saved.round}", stacklevel=2)
    return replace(saved, older=True)


def _attempt(folder: Path, index: Path, ranks: Ranks) -> tuple[Saved | None, RunFolderError | None]:
    try:
        return _load(folder, index, ranks), None
    except RunFolderError as error:
        return None, error


def adopt(folder: Path, saved: Saved) -> None:
    """Continue from ``saved``, after all checks: it is the last checkpoint from now on, and any fallback is sound."""
    with explain_os_errors(folder):
        if saved.older:
            replace_text(folder / NOTE, (folder / OLDER_NOTE).read_text(encoding="utf-8"))
        if any(key.endswith(f".{SLOTS}") for key in saved.tensors):
            # Rows on disk that only the older checkpoint needs may be overwritten.
            (folder / OLDER_NOTE).unlink(missing_ok=True)


def _load(folder: Path, index: Path, ranks: Ranks) -> Saved | None:
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
        written = int(note.get("ranks", 1))
        shards = {int(shard["rank"]): shard for shard in note.get("shards", ())}
        # Each of as many ranks as before needs its own shard only.
        wanted = [r for r in shards if written != ranks.size or r == ranks.rank]
        return Saved(
            int(note["round"]),
            LogMark(int(note["record_bytes"]), note["record_sha256"]),
            _tensors(folder, note),
            {name: LogMark(int(size), sha256) for name, (size, sha256) in note.get("beside", {}).items()},
            note["diverged"],
            Meter(**note["meter"]),
            ranks=written,
            shards={r: _tensors(folder, shards[r]) for r in wanted},
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


def _tensors(folder: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file that the note names."""
    path = folder / Path(about["file"]).name
    if _digest(path) != about["sha256"]:
        raise _damaged(path)
    return load_file(path)


def restore(saved: Saved, state: RunState, ranks: Ranks = ALONE) -> None:
    """Put a checkpoint's tensors into a fresh ``state`` of the same method and model."""
    try:
        fresh = {"w": state.w} | {f"server.{k}": v for k, v in state.server.items()}
        for key, tensor in fresh.items():
            if saved.tensors[key].shape != tensor.shape:
                raise RunFolderError(
                    f"the checkpoint's {key} has shape {tuple(saved.tensors[key].shape)}, not {tuple(tensor.shape)}"
                )
        # Copies: what a file gives may lie at odd addresses, where vectorised sums add in another order.
        placed = {k: placed_like(saved.tensors[k], v) for k, v in fresh.items() if k != "w"}
        if BEST in saved.tensors:
            extra = 0 if state.statistics is None else len(state.statistics)
            state.best = placed_like(saved.tensors[BEST], state.w).view(len(state.w) + extra)
        if state.statistics is not None:
            state.statistics = placed_like(saved.tensors[MEAN], state.w).view_as(state.statistics)
        _restore_memory(saved, "slots", state.slots, ranks)
        _restore_memory(saved, "clients", state.clients, ranks)
    except KeyError as error:
        raise RunFolderError(f"the checkpoint lacks {error}: it belongs to another method") from None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise RunFolderError(f"the checkpoint cannot be used: {error}; restore it or start a new run") from None
    state.w.copy_(saved.tensors["w"])
    state.server = {k: placed[f"server.{k}"] for k in state.server}
    watched = {k.removeprefix(WATCHED): v for k, v in saved.tensors.items() if k.startswith(WATCHED)}
    state.watched = {k: v.to(state.w.device, copy=True) for k, v in watched.items()}
    state.round, state.meter = saved.round, saved.meter


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy on the device, and in the type, of ``like``."""
    return tensor.to(like.device, like.dtype, copy=True)


def _restore_memory(saved: Saved, kind: str, memory: ClientTable, ranks: Ranks) -> None:
    """Restore the memories of this rank: its own, or if there were other ranks, an equal share of all."""

    def table(tensors: dict[str, Tensor]) -> State:
        return {k.removeprefix(f"{kind}."): v for k, v in tensors.items() if k.startswith(f"{kind}.")}

    parts = {0: saved.tensors} | saved.shards
    if saved.ranks == ranks.size:
        own = parts.get(ranks.rank, {f"{kind}/ids": torch.zeros(0, dtype=torch.int64)})
        memory.restore(own[f"{kind}/ids"], table(own))
        return
    everyone = torch.cat([tensors[f"{kind}/ids"] for tensors in parts.values()]).sort().values
    mine = everyone[ranks.rank :: ranks.size]
    memory.restore(mine[:0], {})
    for rank, tensors in sorted(parts.items()):
        ids = tensors[f"{kind}/ids"]
        rows = torch.isin(ids, mine).nonzero()[:, 0].tolist()
        memory.add(ids, table(tensors), rows, part_of(rank, saved.ranks))


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
