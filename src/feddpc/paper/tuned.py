"""The best setting of each method, and which grid found it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from feddpc.errors import RunFolderError
from feddpc.paper import published
from feddpc.paper.study import PaperRow, tuned_row
from feddpc.runs.record import read_json
from feddpc.storage import replace_text

#: How a setting is chosen from the grid: on the test set, as the paper did, or on samples held out of training. With
#: the measure of a run whose mean over seeds is maximized.
SELECTIONS = {"test": "best", "validation": "validation"}
#: FedDPC with lambda, momentum and rate tuned: a row of Table 2 that goes beyond the paper.
MOMENTUM = "feddpc momentum"
#: The hyper-parameters that are tuned besides the rate, by row of Table 2.
TUNED_KEYS = {name: (key,) for name, key in published.TUNED.items()} | {
    "fedavgm": ("momentum",),
    MOMENTUM: ("lam", "momentum"),
}


@dataclass(frozen=True)
class Setting:
    """A rate and a method's hyper-parameters."""

    lr: float
    hyper: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """Settings by alpha, row of the table and selection; ``source`` says where they were found."""

    source: str
    settings: dict[float, dict[str, dict[str, Setting]]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Store the settings in a file."""
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Read the settings from a file."""
        table = read_json(path)
        try:
            settings = {
                float(alpha): {
                    name: {by: Setting(float(s["lr"]), dict(s["hyper"])) for by, s in chosen.items()}
                    for name, chosen in rows.items()
                }
                for alpha, rows in table["settings"].items()
            }
            return cls(str(table["source"]), settings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(
                f"{path} is no file of settings ({type(error).__name__}: {error}): remove it, and run with --ladder"
            ) from None


def known(data: str, folder: Path) -> Tuned:
    """Return the settings of a data set: those of a grid in ``folder``, which win over those that come with feddpc."""
    own, shipped = folder / "tuned.json", Path(str(files("feddpc.paper") / "tuned" / f"{data}.json"))
    stored = [Tuned.read(path) for path in (own, shipped) if path.is_file()]
    settings: dict[float, dict[str, dict[str, Setting]]] = {}
    for tuned in reversed(stored):
        for alpha, rows in tuned.settings.items():
            settings[alpha] = settings.get(alpha, {}) | rows
    sources = dict.fromkeys(tuned.source for tuned in stored)  # the same grid may be in both
    return Tuned("; where that has none, ".join(sources), settings)


def winners(rows: Sequence[PaperRow]) -> dict[str, dict[str, PaperRow]]:
    """Return the best row of each method, by selection and mean over seeds; of equal scores the first that was tried.

    Only settings that ran as long as any of their method can win, and none that diverged, whatever it had reached.
    """
    longest = {name: max(r.config.rounds for r in rows if base_name(r) == name) for name in map(base_name, rows)}
    ended = [row for row in rows if not row.missing and not row.diverged]
    complete = [row for row in ended if row.config.rounds == longest[base_name(row)]]
    chosen: dict[str, dict[str, PaperRow]] = {}
    for selection, measure in SELECTIONS.items():
        scores = [(row, score.mean) for row in complete if (score := row.estimate(measure))]
        for row, _ in sorted(scores, key=lambda entry: -entry[1]):
            chosen.setdefault(base_name(row), {}).setdefault(selection, row)
    return {name: chosen[name] for name in dict.fromkeys(map(base_name, rows)) if name in chosen}


def base_name(row: PaperRow) -> str:
    """Return the row of Table 2 that a row of the ladder is a candidate for."""
    return tuned_row(row.name)


def setting_of(row: PaperRow) -> Setting:
    """Return the tuned setting of a row."""
    name = base_name(row)
    keys = TUNED_KEYS.get(name if name in TUNED_KEYS else row.config.method, ())
    return Setting(row.config.lr, {key: row.config.hyper[key] for key in keys})
