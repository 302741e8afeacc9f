"""The folder of a sweep: a run folder for every item, and tables that can be made anew from them at any time.

``items/KEY`` holds the runs, ``failed/KEY.json`` why one could not be made, ``damaged/`` what was found broken and set
aside, ``claims/`` who works on what. Folders of two machines are merged by copying ``items``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from feddpc.runs.record import is_run, load_config, read_json
from feddpc.storage import explain_os_errors, replace_text, without_sync
from feddpc.study.choose import Choice
from feddpc.study.claims import locked
from feddpc.study.item import Item, settings
from feddpc.study.outcome import Outcome, read

#: What may lie in the folder of a sweep.
PARTS_OF_A_SWEEP = (
    *("sweep.toml", "items", "failed", "damaged", "claims", ".lock"),
    *("results.jsonl", "results.csv", "chosen.json"),
)
#: Columns of results.csv before those of the settings.
COLUMNS = (
    *("key", "label", "method", "seed", "status", "message", "rounds"),
    *("best_accuracy", "best_round", "last10_accuracy", "final_accuracy"),
    *("validation_accuracy", "validation_round", "validated_accuracy", "seconds_per_round"),
)


class Store:
    """The folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.items, self.failed, self.damaged = (folder / name for name in ("items", "failed", "damaged"))

    def make(self) -> None:
        """Make the folder."""
        for path in (self.items, self.failed):
            with explain_os_errors(path):
                path.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Return the run folder of an item."""
        return self.items / key

    def read(self, item: Item) -> Outcome:
        """Return how far an item is."""
        return read(self.path(item.key), item, self.failure(item.key))

    def begun(self, key: str) -> bool:
        """Whether anybody has begun to run an item."""
        return self.path(key).is_dir()

    def summarized(self, key: str) -> bool:
        """Whether a run of an item has come to an end of some kind."""
        return (self.path(key) / "summary.json").is_file()

    def rounds(self, key: str) -> int:
        """Return how many rounds of an item are recorded."""
        try:
            return (self.path(key) / "rounds.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def failure(self, key: str) -> str | None:
        """Return why an item could not be run, or None."""
        note = read_json(self.failed / f"{key}.json", [])
        return str(note.get("message", "")) if note else None

    def fail(self, item: Item, message: str, trace: str = "") -> None:
        """Write down why an item could not be run."""
        note = {"message": message, "label": item.name, "config": item.config.asdict(), "trace": trace}
        replace_text(self.failed / f"{item.key}.json", json.dumps(note, indent=1) + "\n")

    def forgive(self, key: str) -> None:
        """Forget that an item failed: it is tried again."""
        with explain_os_errors(self.failed):
            (self.failed / f"{key}.json").unlink(missing_ok=True)

    def set_aside(self, key: str) -> Path:
        """Move a folder that cannot be used out of the way, so that it no longer counts as a run, and say where to."""
        with explain_os_errors(self.damaged):
            self.damaged.mkdir(exist_ok=True)
            there = next(p for n in range(1, 10_000) if not (p := self.damaged / f"{key}-{n}").exists())
            self.path(key).rename(there)
            if is_run(there):
                (there / "config.toml").rename(there / "config.damaged.toml")
        return there

    def found(self) -> Iterator[Item]:
        """Yield an item for every run folder that is there, whoever put it there."""
        for path in sorted(self.items.iterdir()) if self.items.is_dir() else ():
            if is_run(path):
                yield Item(load_config(path))

    def write_results(self, outcomes: Sequence[Outcome], choices: Sequence[Choice] = ()) -> None:
        """Write results.jsonl and results.csv, and chosen.json if anything was."""
        rows = [_row(outcome, self.folder) for outcome in outcomes]
        with locked(self.folder), without_sync():  # another sweep may be at it, and both can be made anew
            replace_text(self.folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            replace_text(self.folder / "results.csv", _csv(rows))
            if choices:
                chosen = [choice.as_dict() for choice in choices]
                replace_text(self.folder / "chosen.json", json.dumps(chosen, indent=1) + "\n")


def _row(outcome: Outcome, folder: Path) -> dict[str, Any]:
    config = outcome.item.config
    own = {"label": outcome.item.name, "method": config.method, "seed": config.seed}
    plain = {name: own.get(name, getattr(outcome, name, None)) for name in COLUMNS}
    path = outcome.path.relative_to(folder) if outcome.path.is_relative_to(folder) else outcome.path
    return {**plain, "path": str(path), "tags": dict(outcome.item.tags), "settings": settings(config)}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows for a spreadsheet: a column for every setting that is not the same in all."""
    names = dict.fromkeys(name for row in rows for name in row["settings"])
    apart = [n for n in names if len({json.dumps(row["settings"].get(n)) for row in rows}) > 1]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *apart])
    for row in rows:
        writer.writerow([*(row[name] for name in COLUMNS), *(row["settings"].get(name) for name in apart)])
    return text.getvalue()
