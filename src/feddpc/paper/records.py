"""A study in one compact file that can be committed: settings, accuracy and loss of every round.

The documents are made from such files alone. Test accuracies are kept exactly, as counts of correct answers: a test of
their differences must see which are equal. Other accuracies have five decimals, the rest four digits. Seconds are one
mean per run; runs of a grid have accuracies only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feddpc.config import EXECUTION_KEYS, Config
from feddpc.data.specs import spec
from feddpc.errors import FeddpcError, RunFolderError
from feddpc.paper.presets import PRESETS
from feddpc.paper.study import PaperRow, PaperStudy, accuracies, joined
from feddpc.report.groups import status
from feddpc.runs.record import read_json
from feddpc.runs.stored import StoredRun
from feddpc.runs.summary import seconds_per_round
from feddpc.storage import replace_text

_ACCURACIES = ("test_accuracy", "validation_accuracy")
_COLUMNS = (*_ACCURACIES, "train_loss", "mean_scale", "mean_cosine")
#: What identifies a row.
_ROW = ("part", "alpha", "name", "label")
#: The facts about the environment of a run that are kept, as far as all runs agree.
_MACHINE = ("feddpc", "python", "torch", "processor", "cores", "device", "engine", "precision")


def machine(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Return the environment of the runs, as far as all agree."""
    facts = [run.environment | {"precision": run.config.precision} for run in runs]
    values = {key: {fact[key] for fact in facts if key in fact} for key in _MACHINE}
    return {key: known.pop() for key, known in values.items() if len(known) == 1}


def write(study: PaperStudy, path: Path) -> None:
    """Write a study to a file."""
    replace_text(path, dumps(study))


def dumps(study: PaperStudy) -> str:
    """Return a study as JSON: one line per row and per run; a run that several rows share is stored once."""
    configs = [_values(row.config) for row in study.rows]
    shared = {k: v for k, v in configs[0].items() if all(c.get(k) == v for c in configs)} if configs else {}
    rows: list[str] = []
    runs: list[str] = []
    places: dict[tuple[str, int, str], int] = {}
    for row, config in zip(study.rows, configs, strict=True):
        own_runs = {}
        for seed, run in row.runs.items():
            text = _compact(_packed(run, _ACCURACIES if row.part == "grid" else _COLUMNS, spec(study.data).test))
            own_runs[str(seed)] = place = places.setdefault((_compact(config), seed, text), len(runs))
            if place == len(runs):
                runs.append(text)
        named = {key: getattr(row, key) for key in _ROW}
        own = {k: v for k, v in config.items() if k not in shared}
        rows.append(_compact({**named, "seeds": row.seeds, "config": own, "runs": own_runs}))
    head = {"data": study.data, "scale": study.scale, "short": study.short, "origin": study.origin, "shared": shared}
    body = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in head.items())
    return f'{{\n{body},\n "rows": {_listed(rows)},\n "runs": {_listed(runs)}\n}}\n'


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _listed(lines: Sequence[str]) -> str:
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n ]"


def _values(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(config.asdict()))
    return {k: v for k, v in plain.items() if k not in ("seed", *EXECUTION_KEYS)}


def _packed(run: StoredRun, keys: Sequence[str], tested: int) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {key: [_short(key, record.get(key)) for record in run.records] for key in keys}
    if counts := _counts(accuracies(run), tested):
        columns = {"correct": counts, **columns}
        del columns["test_accuracy"]
    return {
        "status": status(run),
        "rounds": len(run.records),
        "seconds": _short("seconds", seconds_per_round(run.records)),
        **{k: v for k in EXECUTION_KEYS if (v := getattr(run.config, k)) != getattr(Config, k)},
        **{key: column for key, column in columns.items() if any(v is not None for v in column)},
    }


def _counts(accuracy: Sequence[float | None], tested: int) -> list[int | None] | None:
    """Return how many of ``tested`` samples were right; None if these are no accuracies on so many.

    >>> _counts([0.5, None, 0.25], 8), _counts([0.3], 8)
    ([4, None, 2], None)
    """
    counts = [None if a is None else round(a * tested) for a in accuracy]
    same = all(a is None or c is None or a == c / tested for a, c in zip(accuracy, counts, strict=True))
    return counts if same else None


def _short(key: str, value: float | None) -> float | None:
    """Round a value to the digits that the file keeps.

    >>> _short("test_accuracy", 0.123456789), _short("train_loss", 12.34567)
    (0.12346, 12.35)
    """
    if value is None:
        return None
    return round(value, 5) if key in _ACCURACIES else float(f"{value:.4g}")


def read(path: Path) -> PaperStudy:
    """Read a study from its file."""
    if not path.is_file():
        raise RunFolderError(f"there is no file {path}: `feddpc reproduce` writes records.json into its folder")
    table = read_json(path)
    try:
        rows, seen = [], {}
        for about in table["rows"]:
            config = Config.read({**table["shared"], **about["config"]})
            row = PaperRow(**{key: about[key] for key in _ROW}, config=config, seeds=tuple(about["seeds"]))
            for seed, place in about["runs"].items():
                if place not in seen:
                    seen[place] = _unpacked(table["runs"][place], row.with_seed(int(seed)), spec(table["data"]).test)
                row.runs[int(seed)] = seen[place]
            rows.append(row)
        origin = dict(table["origin"])
        if "spent" in origin and not 0 <= float(origin["spent"]) < math.inf:
            raise ValueError(f"spent = {origin['spent']}")
        return PaperStudy(table["data"], table["scale"], table["short"], rows, origin)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, FeddpcError) as error:
        raise RunFolderError(
            f"{path} holds no records of a reproduction ({type(error).__name__}: {error}): move it away, and run "
            "`feddpc reproduce`, which writes a new one"
        ) from None


def read_all(paths: Sequence[Path]) -> list[PaperStudy]:
    """Read studies from their files, in the order of the presets; files of one study are put together."""
    studies: dict[tuple[str, str], PaperStudy] = {}
    for study in map(read, paths):
        key = (study.data, study.scale)
        studies[key] = joined(studies[key], study) if key in studies else study
    return sorted(studies.values(), key=lambda study: (list(PRESETS).index(study.data), study.scale))


def _unpacked(about: dict[str, Any], config: Config, tested: int) -> StoredRun:
    columns = {key: about[key] for key in _COLUMNS if key in about}
    if "correct" in about:
        columns["test_accuracy"] = [None if count is None else count / tested for count in about["correct"]]
    records = [
        {"round": t + 1, "seconds": about["seconds"], "test_accuracy": None, "train_loss": None}
        | {key: column[t] for key, column in columns.items()}
        for t in range(about["rounds"])
    ]
    summary = {"status": about["status"], "rounds": len(records)}
    execution = {key: about[key] for key in EXECUTION_KEYS if key in about}
    return StoredRun(Path("records"), dataclasses.replace(config, **execution), records, summary, {})
