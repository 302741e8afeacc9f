"""What is run, cut off and continued: each world runs in a folder, and says what must come out of it."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors.torch import load_file

from feddpc import methods
from feddpc.engine.federation import Progress
from feddpc.engine.placement import Placement
from feddpc.run import checkpoint
from feddpc.run.runner import execute
from feddpc.sweep import claims
from feddpc.sweep import execute as execute_sweep
from feddpc.sweep.item import check
from support import setting_for
from sweeping import items


class World(ABC):
    """Something to run; built before any process is started for it."""

    @abstractmethod
    def go(self, folder: Path) -> None:
        """Run in ``folder``, or continue what is there."""

    @abstractmethod
    def kept(self, folder: Path) -> int:
        """Return how many rounds need not be run again."""

    @abstractmethod
    def facts(self, folder: Path) -> dict[str, bytes]:
        """Return what must be the same however often it was cut off: all files, but for what a clock says."""


class Run(World):
    """One run of three rounds with a checkpoint in each."""

    def __init__(self, method: str, memory: str) -> None:
        self.method, self.memory = methods.create(method), memory
        self.setting = setting_for(self.method, rounds=3, engine="loop", client_memory=memory)

    def go(self, folder: Path) -> None:
        execute(self.setting, method=self.method, out=folder, resume=True, checkpoint_seconds=0)

    def kept(self, folder: Path) -> int:
        saved = checkpoint.load(folder / "checkpoint")
        return saved.round if saved else 0

    def facts(self, folder: Path) -> dict[str, bytes]:
        return _files(folder) | self._checkpoint(folder / "checkpoint")

    def _checkpoint(self, folder: Path) -> dict[str, bytes]:
        """The state as it is restored: where a row lies in a file is no matter, what it holds is."""
        placement = Placement(self.memory, folder)  # type: ignore[arg-type]
        progress = Progress.begin(self.method, self.setting.w0, self.setting.federation.population, placement)
        saved = checkpoint.load(folder)
        assert saved is not None
        checkpoint.restore(saved, progress)
        found = {"w": progress.w, **{f"server {k}": v for k, v in progress.server.items()}}
        for kind, memory in (("slots", progress.slots), ("clients", progress.clients)):
            ids, _ = memory.export()
            found |= {f"{kind} of {sorted(ids.tolist())}": torch.zeros(0)}
            found |= {f"{kind} {k}": v for k, v in memory.read(ids.sort().values.numpy()).items()}
        facts = {f"checkpoint: {k}": v.numpy().tobytes() for k, v in found.items()}
        return facts | {"checkpoint: round": repr((saved.round, saved.meter, saved.diverged)).encode()}


class Sweep(World):
    """Four short runs of a sweep, which leave neither models nor checkpoints."""

    def __init__(self) -> None:
        self.items = items(rounds=3)
        check(self.items)  # loads the data, once for all processes
        claims.GONE = 0.5  # a claim that lost its content in a power cut is waited for, a minute otherwise

    def go(self, folder: Path) -> None:
        execute_sweep(self.items, folder, checkpoint_seconds=0)

    def kept(self, folder: Path) -> int:
        return 0

    def facts(self, folder: Path) -> dict[str, bytes]:
        found = {f"{p.name}/{k}": v for p in sorted((folder / "items").iterdir()) for k, v in _files(p).items()}
        rows = (folder / "results.jsonl").read_text(encoding="utf-8")
        return found | {"results": re.sub(r'"seconds_per_round": [^,]+,', "", rows).encode()}


def _files(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name not in (".lock", "environment.json")):
        content = path.read_bytes()
        if path.name == "rounds.jsonl":
            content = re.sub(rb'"seconds": [^,]+,', b"", content)
        if path.name == "summary.json":
            content = json.dumps({**json.loads(content), "seconds_per_round": None}).encode()
        if path.suffix == ".safetensors":
            load_file(path)  # whole
        found[path.name] = content
    return found


def make(name: str) -> World:
    """Return a world by name."""
    if name == "sweep":
        return Sweep()
    method, memory = name.split(" on ")
    return Run(method, memory)
