"""What came of an item: read from its run folder, finished or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddpc.errors import RunFolderError
from feddpc.runs.record import is_blank, load_config, read_json, read_records, summarize
from feddpc.study.item import Item

#: What a run must have recorded to be counted.
ENDS = {"finished": "done", "diverged": "diverged"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An item and how it ended. Accuracies are shares from 0 to 1; None is what is not known."""

    key: str
    item: Item
    status: str  #: done, diverged, missing (not run, or not to its end) or failed
    message: str = ""  #: why it failed or diverged, or how far it is
    damaged: bool = False  #: whether something lies there that cannot be used
    rounds: int = 0
    best_accuracy: float | None = None  #: highest test accuracy of any round
    best_round: int | None = None
    last10_accuracy: float | None = None
    final_accuracy: float | None = None
    validation_accuracy: float | None = None  #: highest accuracy of any round on held-out training samples
    validation_round: int | None = None
    validated_accuracy: float | None = None  #: test accuracy in that round
    seconds_per_round: float | None = None
    path: Path

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to run."""
        return self.status in ENDS.values()

    def records(self) -> list[dict[str, Any]]:
        """Read the rounds."""
        return read_records(self.path / "rounds.jsonl")

    def score(self, by: str) -> float | None:
        """Return what settings are chosen by: the best accuracy on held-out samples, or on the test set."""
        return self.validation_accuracy if by == "validation" else self.best_accuracy


def read(path: Path, item: Item, failure: str | None = None) -> Outcome:
    """Return what the run folder ``path`` says about ``item``; ``failure`` is what is known of an attempt to run it."""
    try:
        return _read(path, item, failure)
    except RunFolderError as error:
        return Outcome(key=item.key, item=item, status="missing", message=f"damaged: {error}", damaged=True, path=path)


def _read(path: Path, item: Item, failure: str | None) -> Outcome:
    if is_blank(path):
        status, message = ("missing", "") if failure is None else ("failed", failure)
        return Outcome(key=item.key, item=item, status=status, message=message, path=path)
    stored = load_config(path)
    if different := stored.differences(item.decisive()):
        raise RunFolderError(f"it belongs to another configuration ({'; '.join(different)})")
    records, summary = read_records(path / "rounds.jsonl"), read_json(path / "summary.json")
    status, message = ENDS.get(str(summary.get("status")), "missing"), str(summary.get("reason") or "")
    if status != "missing" and summary.get("rounds") != len(records):
        raise RunFolderError(f"{len(records)} rounds are recorded, but the summary has {summary.get('rounds')}")
    if status == "done" and len(records) != stored.rounds:
        raise RunFolderError(f"{len(records)} of {stored.rounds} rounds are recorded, but the summary says finished")
    if status == "missing":
        status, message = ("missing", "") if failure is None else ("failed", failure)
        message = message or f"{len(records)} of {stored.rounds} rounds"
    try:
        facts = summarize(stored, records, status, None)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path / 'rounds.jsonl'}: a round lacks or garbles {error}") from None
    known: dict[str, Any] = {
        name: facts.get(name) for name in Outcome.__dataclass_fields__ if name in facts and name != "status"
    }
    return Outcome(key=item.key, item=item, status=status, message=message, path=path, **known)
