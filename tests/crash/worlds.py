"""What is run, cut off and continued: each world runs in a folder, and says what must come out of it."""

from __future__ import annotations

import json
import logging
import re
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Array, Message
from safetensors.torch import load_file

from feddpc import flower, methods
from feddpc.round.placement import Placement
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.runner import execute
from feddpc.study import run_study
from federations import Unreliable, halves, train
from ranks_in_threads import ThreadRanks, on_ranks
from support import setting_for
from sweeping import specs


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

    def __init__(self, method: str, memory: str, keep: str = "last") -> None:
        self.method, self.memory = methods.create(method), memory
        self.setting = setting_for(self.method, rounds=3, engine="loop", client_memory=memory, keep=keep)

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
        progress = RunState.begin(self.method, self.setting.w0, len(self.setting.population), placement)
        saved = checkpoint.load(folder)
        assert saved is not None
        checkpoint.restore(saved, progress)
        found = {"w": progress.w, **{f"server {k}": v for k, v in progress.server.items()}}
        found |= {} if progress.best is None else {"best": progress.best}
        for kind, memory in (("slots", progress.slots), ("clients", progress.clients)):
            ids, _ = memory.export()
            found |= {f"{kind} of {sorted(ids.tolist())}": torch.zeros(0)}
            found |= {f"{kind} {k}": v for k, v in memory.read(ids.sort().values.numpy()).items()}
        facts = {f"checkpoint: {k}": v.numpy().tobytes() for k, v in found.items()}
        return facts | {"checkpoint: round": repr((saved.round, saved.meter, saved.diverged)).encode()}


class TwoRanks(Run):
    """The same run on two ranks, threads of one process that take turns at files."""

    def __init__(self, method: str, memory: str) -> None:
        super().__init__(method, memory)
        how = {"rounds": 3, "engine": "distributed", "inner_engine": "loop", "client_memory": memory}
        self.settings = [setting_for(self.method, **how) for _ in range(2)]

    def go(self, folder: Path) -> None:
        mine = threading.local()
        with patch("feddpc.runs.runner.join", lambda *_: mine.ranks):

            def one(ranks: ThreadRanks) -> None:
                mine.ranks = ranks
                setting = self.settings[ranks.rank]
                execute(setting, method=self.method, out=folder, resume=True, checkpoint_seconds=0)

            on_ranks(2, one)


class Sweep(World):
    """Four short runs of a sweep, which leave neither models nor checkpoints."""

    def __init__(self) -> None:
        self.specs = specs(rounds=3)
        for spec in self.specs:
            _ = spec.key  # loads the data, once for all processes

    def go(self, folder: Path) -> None:
        run_study(self.specs, folder, checkpoint_seconds=0)

    def kept(self, folder: Path) -> int:
        return 0

    def facts(self, folder: Path) -> dict[str, bytes]:
        found = {f"{p.name}/{k}": v for p in sorted((folder / "items").glob("*/")) for k, v in _files(p).items()}
        rows = (folder / "results.jsonl").read_text(encoding="utf-8")
        return found | {"results": re.sub(r'"seconds_per_round": [^,]+,', "", rows).encode()}


#: Client 4 takes part in rounds 1 and 2.
VICTIM = 4


class Federation(World):
    """Three rounds over Flower in one process: server and clients keep their memories below the same folder.

    One client sends a NaN in rounds 1 and 2, so that the server has something to list.
    """

    def __init__(self, method: str) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.method = methods.create(method)
        self.server, self.client = halves(reserve=self.method.reserve, cohort=4)

    def go(self, folder: Path) -> None:
        app = flower.client_app(**self.client, folder=folder / "clients")
        strategy = flower.strategy(self.method, **self.server, folder=folder / "run")
        train(strategy, Unreliable(app, victim=VICTIM, fault=_spoilt), 3)

    def kept(self, folder: Path) -> int:
        saved = checkpoint.load(folder / "run" / "checkpoint")
        return saved.round if saved else 0

    def facts(self, folder: Path) -> dict[str, bytes]:
        saved = checkpoint.load(folder / "run" / "checkpoint")
        assert saved is not None
        state = {f"checkpoint: {key}": value.numpy().tobytes() for key, value in saved.tensors.items()}
        clients = {f"clients: {key}": value for key, value in _files(folder / "clients").items()}
        run = _files(folder / "run")
        assert run["refused.jsonl"].count(b"is not finite") == 2
        return run | state | clients | {"checkpoint: round": repr((saved.round, saved.meter)).encode()}


def _spoilt(t: int, replies: list[Message]) -> list[Message]:
    """Put a NaN into an upload of the first two rounds."""
    if t <= 2:
        record = next(iter(replies[0].content.array_records.values()))
        name = next(iter(record))
        record[name] = Array(record[name].numpy() * np.nan)
    return replies


def _files(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(p for p in folder.glob("*") if p.is_file() and p.name not in (".lock", "environment.json")):
        content = path.read_bytes()
        if path.name == "rounds.jsonl":
            content = re.sub(rb'"(seconds|time)": [^,]+,', b"", content)
        if path.name == "summary.json":
            when = dict.fromkeys(("seconds_per_round", "first_round_began", "last_round_began"))
            content = json.dumps({**json.loads(content), **when}).encode()
        if path.suffix == ".safetensors":
            load_file(path)  # whole
        found[path.name] = content
    return found


def make(name: str) -> World:
    """Return a world by name."""
    if name == "sweep":
        return Sweep()
    if name.startswith("federation of "):
        return Federation(name.removeprefix("federation of "))
    if name.endswith(" by two ranks"):
        return TwoRanks(*name.removesuffix(" by two ranks").split(" on "))
    method, memory = name.removeprefix("best of ").split(" on ")
    return Run(method, memory, "best" if name.startswith("best of ") else "last")
