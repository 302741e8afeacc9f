"""Trackers: what a run records also goes to TensorBoard, MLflow, or a tracker of your own, while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from feddpc.config import Config
from feddpc.errors import BadInputError, unknown
from feddpc.runs.tracking.base import Tracker

__all__ = ["Track", "Tracker", "Tracking", "check", "tracked"]

#: What leaves its mark in a run folder, by the name of the tracker.
_MARKS = {"tensorboard": "tensorboard", "mlflow": "mlflow.json"}
#: What installs their libraries.
_INSTALL = {
    "tensorboard": "pip install 'tensorboard>=2.16'",
    "mlflow": "pip install 'mlflow-skinny>=3.0' 'sqlalchemy>=2.0' 'alembic>=1.10'",
}
#: Names of trackers with commas between them, or a list of names and trackers of your own.
Track = str | Sequence[str | Tracker]


def tracked(folder: Path) -> list[str]:
    """Return the names of the trackers that know the run in ``folder``, or one of the runs below it."""
    return [name for name, mark in _MARKS.items() if (folder / mark).exists() or any(folder.glob(f"*/{mark}"))]


def check(track: Track, resumed: Path | None = None) -> list[Tracker]:
    """Return the trackers that are asked for, each once, or say why one of them cannot be used.

    Those that have tracked what is in the folder ``resumed`` go on.
    """
    asked = [name.strip() for name in track.split(",")] if isinstance(track, str) else list(track)
    trackers: dict[str, Tracker] = {}
    for one in [*asked, *(tracked(resumed) if resumed else [])]:
        tracker = one if not isinstance(one, str) else trackers.get(one) or _made(one)
        trackers.setdefault(tracker.name, tracker)
    return list(trackers.values())


def _made(name: str) -> Tracker:
    if name not in _MARKS:
        raise unknown("tracker", name, _MARKS)
    try:
        return cast(Tracker, import_module(f"feddpc.runs.tracking.{name}").make())
    except ImportError as error:
        raise BadInputError(f"tracking with {name} needs its library ({error}): {_INSTALL[name]}") from None


class Tracking:
    """Several trackers as one that cannot fail: one that does is named in a warning and left alone from then on."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._live = list(trackers)

    @classmethod
    def of(cls, track: Track, out: Path | None, resume: bool) -> Tracking:
        """Return what tracks the run in ``out``: what is asked for, and what has tracked it until now."""
        if out is None:
            if track:
                raise BadInputError("track needs a folder that holds the run too: give out")
            return cls()
        return cls(check(track, out if resume else None))

    def begin(self, config: Config, folder: Path, past: Sequence[dict[str, Any]]) -> None:
        """A run starts, or goes on after the rounds in ``past``."""
        self._tell("begin", config, folder, past)

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""
        self._tell("round", record)

    def end(self, summary: dict[str, Any] | None) -> None:
        """The run has ended, or was broken off."""
        self._tell("end", summary)

    def _tell(self, what: str, *about: Any) -> None:
        for tracker in list(self._live):
            try:
                getattr(tracker, what)(*about)
            except Exception as error:
                self._live.remove(tracker)
                why = str(error).partition("\n")[0][:200] or type(error).__name__
                kept = "the run goes on and its records are kept; resume it with the tracker to send what is missing"
                warnings.warn(f"tracking with {tracker.name} has stopped ({why}): {kept}", stacklevel=3)
