"""A study in one compact file that can be committed, with all that its tables and figures need.

The documents are made from such files alone. Test accuracies of every round are kept exactly, as counts of correct
answers: a test of their differences must see which are equal. They are 16-bit numbers in base64. Training loss and
FedDPC's factor and cosine are means over blocks of five rounds, with four digits; round 1, which has no last step, is a
block of its own. Seconds are one mean per run. Of runs that tuned a setting only the rounds that choose are kept: the
best on test and on validation, and the last. What most rows or runs have is said once, for all.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from feddpc import methods
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
#: What is kept as means over blocks of rounds, and how many rounds a block has.
_BLOCKS = ("train_loss", "mean_scale", "mean_cosine")
_ROUNDS = 5
#: Rounds that a run in a file has at most.
_MOST = 1_000_000
#: Stands for a round without evaluation among counts of correct answers.
_NONE = 0xFFFF
#: What most runs have in common.
_OF_RUNS = ("status", "rounds", *EXECUTION_KEYS)
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
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    places: dict[tuple[str, int, str], int] = {}
    for row, config in zip(study.rows, configs, strict=True):
        own_runs = {}
        for seed, run in row.runs.items():
            packed = _packed(run, spec(study.data).test, tuning=row.part == "grid")
            place = places.setdefault((_compact(config), seed, _compact(packed)), len(runs))
            own_runs[str(seed)] = place
            if place == len(runs):
                runs.append(packed)
        rows.append({**{key: getattr(row, key) for key in _ROW}, "seeds": row.seeds, "runs": own_runs})
    usual, usual_run = _most_common(configs), _most_common(runs, _OF_RUNS)
    for row_about, config in zip(rows, configs, strict=True):
        row_about["config"] = _unusual(config, usual)
    head = {key: getattr(study, key) for key in ("data", "scale", "short", "origin")}
    head |= {"usual": usual, "usual_run": usual_run}
    body = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in head.items())
    lines = [_listed(map(_compact, mine)) for mine in (rows, (_unusual(run, usual_run) for run in runs))]
    return f'{{\n{body},\n "rows": {lines[0]},\n "runs": {lines[1]}\n}}\n'


def _most_common(tables: Sequence[dict[str, Any]], keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the most common value of every key."""
    counted = {
        key: Counter(_compact(table[key]) for table in tables)
        for key in keys or dict.fromkeys(k for t in tables for k in t)
    }
    return {key: json.loads(counts.most_common(1)[0][0]) for key, counts in counted.items() if counts}


def _unusual(table: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in usual or value != usual[key]}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _listed(lines: Iterable[str]) -> str:
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n ]"


def _values(config: Config) -> dict[str, Any]:
    """Return what a row is, without its seed, and of its hyper-parameters those that are not the method's own."""
    plain: dict[str, Any] = json.loads(json.dumps(config.asdict()))
    plain["hyper"] = _unusual(plain["hyper"], methods.create(config.method).hyper())
    return {k: v for k, v in plain.items() if k not in ("seed", *EXECUTION_KEYS)}


def _config(values: dict[str, Any]) -> Config:
    """Return the configuration of what `_values` returned."""
    return Config.read({**values, "hyper": methods.create(values["method"], **values["hyper"]).hyper()})


def _packed(run: StoredRun, tested: int, *, tuning: bool) -> dict[str, Any]:
    """Return what is kept of a run; of one that tuned a setting, the rounds that choose."""
    tested_in = accuracies(run)
    held_out = [record.get("validation_accuracy") for record in run.records]
    packed: dict[str, Any] = {
        "status": status(run),
        "rounds": len(run.records),
        "seconds": _digits(seconds_per_round(run.records)),
        **{key: getattr(run.config, key) for key in EXECUTION_KEYS},
    }
    if tuning:
        packed["at"] = kept = _deciding(tested_in, held_out)
        tested_in, held_out = ([column[t] for t in kept] for column in (tested_in, held_out))
    counts = _counts(tested_in, tested)
    packed |= {"correct": _encoded(counts)} if counts else {"test_accuracy": _five(tested_in)}
    if any(value is not None for value in held_out):
        packed["validation_accuracy"] = _five(held_out)
    columns = {} if tuning else {key: [record.get(key) for record in run.records] for key in _BLOCKS}
    return packed | {key: _block_means(column) for key, column in columns.items() if any(v is not None for v in column)}


def _five(column: Sequence[float | None]) -> list[float | None]:
    return [None if a is None else round(a, 5) for a in column]


def _deciding(tested: Sequence[float | None], held_out: Sequence[float | None]) -> list[int]:
    """Return the rounds, counted from 0, that measures of a run look at.

    >>> _deciding([0.1, 0.5, 0.4, 0.3], [0.3, 0.2, None, 0.1])
    [0, 1, 3]
    """
    known = [[t for t, value in enumerate(column) if value is not None] for column in (tested, held_out)]
    best = {max(at, key=lambda t: column[t] or 0.0) for at, column in zip(known, (tested, held_out), strict=True) if at}
    return sorted(best | set(range(len(tested))[-1:]))


def _edges(rounds: int) -> list[int]:
    """Return where blocks begin, and the end: round 1 alone, then blocks of five.

    >>> _edges(9)
    [0, 1, 6, 9]
    """
    return [0, *range(1, rounds, _ROUNDS), rounds] if rounds else [0]


def _block_means(column: Sequence[float | None]) -> list[float | None]:
    """Return the mean of every block, over the rounds that have a value."""
    blocks = [[v for v in column[a:b] if v is not None] for a, b in itertools.pairwise(_edges(len(column)))]
    return [_digits(math.fsum(known) / len(known)) if known else None for known in blocks]


def _spread(means: Sequence[float | None], rounds: int) -> list[float | None]:
    """Return a value for every round: the mean of its block."""
    return [m for m, (a, b) in zip(means, itertools.pairwise(_edges(rounds)), strict=True) for _ in range(a, b)]


def _encoded(counts: Sequence[int | None]) -> str:
    """Return counts as 16-bit numbers in base64.

    >>> _decoded(_encoded([4, None, 9999]))
    [4, None, 9999]
    """
    numbers = array("H", (_NONE if count is None else count for count in counts))
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def _decoded(text: str) -> list[int | None]:
    numbers = array("H", base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return [None if count == _NONE else count for count in numbers]


def _counts(accuracy: Sequence[float | None], tested: int) -> list[int | None] | None:
    """Return how many of ``tested`` samples were right; None if these are no accuracies on so many.

    >>> _counts([0.5, None, 0.25], 8), _counts([0.3], 8)
    ([4, None, 2], None)
    """
    if tested >= _NONE:
        return None
    counts = [None if a is None else round(a * tested) for a in accuracy]
    same = all(a is None or c is None or a == c / tested for a, c in zip(accuracy, counts, strict=True))
    return counts if same else None


def _digits(value: float | None) -> float | None:
    """Round a value to the four digits that the file keeps.

    >>> _digits(12.34567)
    12.35
    """
    return None if value is None else float(f"{value:.4g}")


def read(path: Path) -> PaperStudy:
    """Read a study from its file."""
    if not path.is_file():
        raise RunFolderError(f"there is no file {path}: `feddpc reproduce` writes records.json into its folder")
    table = read_json(path)
    try:
        rows, seen = [], {}
        for about in table["rows"]:
            config = _config({**table["usual"], **about["config"]})
            row = PaperRow(**{key: about[key] for key in _ROW}, config=config, seeds=tuple(about["seeds"]))
            for seed, place in about["runs"].items():
                if place not in seen:
                    seen[place] = _unpacked(
                        {**table["usual_run"], **table["runs"][place]},
                        row.with_seed(int(seed)),
                        spec(table["data"]).test,
                    )
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
    rounds = int(about["rounds"])
    if not 0 <= rounds <= _MOST:
        raise ValueError(f"rounds = {rounds}")
    columns: dict[str, list[Any]] = {key: about[key] for key in _ACCURACIES if key in about}
    if "correct" in about:
        columns["test_accuracy"] = [None if count is None else count / tested for count in _decoded(about["correct"])]
    if "at" in about:
        columns = {key: _placed(column, about["at"], rounds) for key, column in columns.items()}
    columns |= {key: _spread(about[key], rounds) for key in _BLOCKS if key in about}
    records = [
        {"round": t + 1, "seconds": about["seconds"], "test_accuracy": None, "train_loss": None}
        | {key: column[t] for key, column in columns.items()}
        for t in range(rounds)
    ]
    summary = {"status": about["status"], "rounds": len(records)}
    execution = {key: about[key] for key in EXECUTION_KEYS}
    return StoredRun(Path("records"), dataclasses.replace(config, **execution), records, summary, {})


def _placed(column: Sequence[Any], at: Sequence[int], rounds: int) -> list[Any]:
    """Return the values of some rounds in a column of all."""
    placed = [None] * rounds
    for t, value in zip(at, column, strict=True):
        placed[t] = value
    return placed
