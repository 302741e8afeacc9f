"""Checkpoints: the whole state of a run in one safetensors file, and a small JSON that names the valid one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from feddpc.engine.memory import Memory
from feddpc.engine.meter import Meter
from feddpc.engine.rounds import Progress
from feddpc.engine.rows import SLOTS
from feddpc.errors import RunFolderError
from feddpc.run.files import explained, replace_file, replace_text

FORMAT = 2


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says beside its tensors: the round, and how long the records were then."""

    round: int
    record_bytes: int
    tensors: dict[str, Tensor]
    diverged: str | None = None  #: why the run must not go on
    meter: Meter = field(default_factory=Meter)


def save(folder: Path, progress: Progress, record_bytes: int, diverged: str | None = None) -> None:
    """Write the state after ``progress.round``; the previous checkpoint stays valid until this one is complete.

    Memories on disk bring their rows there when they export; the checkpoint says where.
    """
    with explained(folder):
        folder.mkdir(exist_ok=True)
    tensors = {"w": progress.w} | {f"server.{k}": v for k, v in progress.server.items()}
    memories = {"slots": progress.slots, "clients": progress.clients}
    for kind, memory in memories.items():
        ids, table = memory.export()
        tensors |= {f"{kind}/ids": ids} | {f"{kind}.{k}": v for k, v in table.items()}
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    name = f"round-{progress.round:07d}.safetensors"
    replace_file(folder / name, lambda path: save_file(tensors, path))
    note = {
        "format": FORMAT,
        "round": progress.round,
        "record_bytes": record_bytes,
        "file": name,
        "sha256": _digest(folder / name),
        "diverged": diverged,
        "meter": asdict(progress.meter),
    }
    replace_text(folder / "checkpoint.json", json.dumps(note, indent=1) + "\n")
    for memory in memories.values():
        memory.committed()
    kept = {name} | {f"{kind}.rows" for kind in memories if f"{kind}.{SLOTS}" in tensors}
    for old in [*folder.glob("round-*.safetensors"), *folder.glob("*.rows")]:
        if old.name not in kept:
            old.unlink(missing_ok=True)


def load(folder: Path) -> Saved | None:
    """Return the last complete checkpoint, None if there is none yet; a damaged one is an error."""
    index = folder / "checkpoint.json"
    if not index.exists():
        return None
    try:
        note = json.loads(index.read_text(encoding="utf-8"))
        if note["format"] != FORMAT:
            raise RunFolderError(f"{index} has format {note['format']}, this version reads {FORMAT}")
        path = folder / Path(note["file"]).name
        if _digest(path) != note["sha256"]:
            raise RunFolderError(f"{path} does not match its checksum: it was damaged; restore it or start a new run")
        return Saved(
            int(note["round"]), int(note["record_bytes"]), load_file(path), note["diverged"], Meter(**note["meter"])
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunFolderError(f"the checkpoint in {folder} cannot be read: {error}") from None


def restore(saved: Saved, progress: Progress) -> None:
    """Put a checkpoint's tensors into a fresh ``progress`` of the same method and model."""
    try:
        fresh = {"w": progress.w} | {f"server.{k}": v for k, v in progress.server.items()}
        for key, tensor in fresh.items():
            if saved.tensors[key].shape != tensor.shape:
                raise RunFolderError(
                    f"the checkpoint's {key} has shape {tuple(saved.tensors[key].shape)}, not {tuple(tensor.shape)}"
                )
        # Copies: what a file gives may lie at odd addresses, where vectorised sums add in another order.
        placed = {k: saved.tensors[k].to(v.device, v.dtype, copy=True) for k, v in fresh.items()}
        _restore_memory(saved, "slots", progress.slots)
        _restore_memory(saved, "clients", progress.clients)
    except KeyError as error:
        raise RunFolderError(f"the checkpoint lacks {error}: it belongs to another method") from None
    progress.w = placed["w"]
    progress.server = {k: placed[f"server.{k}"] for k in progress.server}
    progress.round, progress.meter = saved.round, saved.meter


def _restore_memory(saved: Saved, kind: str, memory: Memory) -> None:
    table = {k.removeprefix(f"{kind}."): v for k, v in saved.tensors.items() if k.startswith(f"{kind}.")}
    memory.restore(saved.tensors[f"{kind}/ids"], table)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def load_model(path: Path) -> dict[str, Tensor]:
    """Read what :func:`save_model` wrote."""
    try:
        # Copies: see restore.
        return {k: v.clone() for k, v in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None


def save_model(path: Path, state_dict: dict[str, Tensor]) -> None:
    """Write a model's state_dict as safetensors."""
    replace_file(path, lambda temporary: save_file({k: v.contiguous() for k, v in state_dict.items()}, temporary))
