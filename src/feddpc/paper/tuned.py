"""The settings recorded as best: what each method is run with after tuning, and where that was found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from feddpc.errors import RunFolderError
from feddpc.paper import published
from feddpc.paper.study import Row
from feddpc.runs.record import read_json
from feddpc.storage import replace_text

#: How a setting is chosen from the grid: on the test set, as the paper did, or on samples held out of training.
Selection = Literal["test", "validation"]
SELECTIONS: tuple[Selection, ...] = ("test", "validation")
_SCORE = {"test": "best", "validation": "validation"}


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
        """Store the settings in a file, one line per row."""
        blocks = []
        for alpha, rows in self.settings.items():
            lines = [
                f"   {json.dumps(name)}: " + json.dumps({by: asdict(setting) for by, setting in chosen.items()})
                for name, chosen in rows.items()
            ]
            blocks.append(f'  "{alpha:g}": {{\n' + ",\n".join(lines) + "\n  }")
        body = ",\n".join(blocks)
        replace_text(path, f'{{\n "source": {json.dumps(self.source)},\n "settings": {{\n{body}\n }}\n}}\n')

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
                f"{path} is no file of settings ({type(error).__name__}: {error}): remove it, and run with --grid again"
            ) from None


def known(data: str, folder: Path) -> Tuned:
    """Return the settings of a data set: those that a grid in ``folder`` found, before those that come with feddpc."""
    own, shipped = folder / "tuned.json", Path(str(files("feddpc.paper") / "tuned" / f"{data}.json"))
    found = [Tuned.read(path) for path in (own, shipped) if path.is_file()]
    settings: dict[float, dict[str, dict[str, Setting]]] = {}
    for tuned in reversed(found):
        for alpha, rows in tuned.settings.items():
            settings[alpha] = settings.get(alpha, {}) | rows
    sources = dict.fromkeys(tuned.source for tuned in found)  # the same grid may be in both
    return Tuned("; where that has none, ".join(sources), settings)


def winners(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return the best row of each method in a grid, by selection; equal scores go to the larger rate, tried first.

    A setting that diverged is never chosen, whatever it had reached.
    """
    chosen: dict[str, dict[str, Row]] = {}
    for by in SELECTIONS:
        for row in (r for r in rows if not r.missing and not r.diverged):
            name, mine = base_name(row), row.about(_SCORE[by])
            best = chosen.setdefault(name, {}).get(by)
            theirs = None if best is None else best.about(_SCORE[by])
            if mine is not None and (theirs is None or mine.mean > theirs.mean):
                chosen[name][by] = row
    return {name: by for name, by in chosen.items() if by}


def base_name(row: Row) -> str:
    """Return the row of the table that a grid row is a candidate for: what stands before its settings."""
    return row.line.name.partition(" lr=")[0]


def setting_of(row: Row) -> Setting:
    """Return what a grid row was tuned to."""
    config = row.line.config
    key = published.TUNED.get(config.method)
    return Setting(config.lr, {key: config.hyper[key]} if key else {})
