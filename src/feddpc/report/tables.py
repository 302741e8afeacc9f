"""The table of a comparison: one row a configuration, mean and spread over its seeds."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.errors import RunFolderError
from feddpc.report.groups import Group, groups, status
from feddpc.report.table import Table, percent
from feddpc.runs.record import StoredRun, is_run, load, summarize
from feddpc.storage import explain_os_errors

if TYPE_CHECKING:
    import rich.table

#: Heading of every column but the notes, and what it means.
HEADINGS = {
    "method": "the method, and what sets it apart from the others here",
    "seeds": "the seeds that the row is the mean of",
    "best %": "highest test accuracy of any round, mean over seeds ± sample standard deviation",
    "round": "the round of the highest test accuracy, mean over seeds",
    "last 10 %": "test accuracy over the last ten rounds, mean over seeds ± sample standard deviation",
    "final %": "test accuracy of the last round, mean over seeds",
    "s/round": "seconds per round, mean over seeds and rounds but the first",
    "rounds": "rounds done",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration over its seeds. Accuracies are shares from 0 to 1; None is what is not known."""

    label: str
    seeds: list[int]
    best_accuracy: float | None
    best_spread: float | None  #: sample standard deviation; None for one seed
    best_round: int | None  #: mean of the seeds' best rounds
    last10_accuracy: float | None
    last10_spread: float | None
    final_accuracy: float | None
    seconds_per_round: float | None
    rounds: list[int]  #: rounds done, a seed
    notes: list[str]  #: what a reader must know before comparing
    best: bool = False  #: whether no other row has a higher ``best_accuracy``


def collect(folder: Path, damage: list[str] | None = None) -> list[StoredRun]:
    """Read the run in ``folder``, or all runs below it, in the order of the comparison or sweep they belong to.

    ``compare.json``, or ``order.json`` of a sweep, holds ``{"runs": ["feddpc-seed0", ...]}``; other folders are sorted
    by name. A run it names that is not there yet is left out. What
    is broken is an error; with ``damage`` it is left out, and said there together with the runs that are still to come.
    """
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}: give one that `feddpc run` or `feddpc compare` wrote")
    found = []
    for path in (p for p in _below(folder, damage) if p == folder or _ours(p)):
        try:
            run = load(path, damage)
            found.append(run if damage is None else _sound(run, damage))
        except RunFolderError as error:
            if damage is None or path == folder:
                raise
            damage.append(f"{error}; this run is left out")
    if damage is not None:  # a page may be sent to others, who have no use for where it lay
        damage[:] = [said.replace(f"{folder}{os.sep}", "") for said in damage]
    if not found:
        raise RunFolderError(
            f"{folder} holds no run that can be read: give a folder that `feddpc run` or `feddpc compare` wrote"
            + (f" ({damage[0]})" if damage else "")
        )
    return found


def _sound(run: StoredRun, damage: list[str]) -> StoredRun:
    """Return a run without the records from the first one on that lacks what every record has."""
    for i, record in enumerate(run.records):
        known = [record.get(key, "") for key in ("test_accuracy", "seconds")]
        if not all(v is None or isinstance(v, int | float) for v in known) or known[1] is None:
            where = f"{run.folder / 'rounds.jsonl'}, line {i + 1}"
            damage.append(f"{where}: accuracy or seconds are missing; the rounds from there on are left out")
            return dataclasses.replace(run, records=run.records[:i])
    return run


def _ours(path: Path) -> bool:
    """Whether a folder with a config.toml is a run: other programs have files of that name."""
    return any((path / name).exists() for name in ("rounds.jsonl", "environment.json", "summary.json"))


def _below(folder: Path, damage: list[str] | None, rank: Mapping[str, int] | None = None) -> list[Path]:
    if is_run(folder):
        return [folder]
    rank = rank or {}
    for path in (folder / "compare.json", folder / "order.json"):
        if path.is_file():
            rank = {name: i for i, name in enumerate(_order(path, damage))}
    if damage is not None and (folder / "compare.json").is_file():
        damage += [f"{folder / name} has not begun" for name in rank if not (folder / name).is_dir()]
    with explain_os_errors(folder):
        inside = [p for p in folder.iterdir() if p.is_dir() and (not p.is_symlink() or is_run(p))]
    inside.sort(key=lambda p: (rank.get(p.name, len(rank)), p.name))
    return [run for path in inside for run in _below(path, damage, rank)]


def _order(path: Path, damage: list[str] | None) -> list[str]:
    try:
        return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        remedy = 'it must hold {"runs": [names of run folders]}; repair it or remove it'
        said = f"{path} cannot be read ({type(error).__name__}: {error}): {remedy}"
        if damage is None:
            raise RunFolderError(said) from None
        damage.append(said)
        return []


def rows(runs: Sequence[StoredRun]) -> list[Row]:
    """Return one row a configuration, in the order in which configurations first appear."""
    table = [_row(group) for group in groups(runs)]
    most = max((row.best_accuracy for row in table if row.best_accuracy is not None), default=None)
    return [dataclasses.replace(row, best=most is not None and row.best_accuracy == most) for row in table]


def _row(group: Group) -> Row:
    ends = [status(run) for run in group.runs]
    summaries = [_summary(run, end) for run, end in zip(group.runs, ends, strict=True)]

    def known(key: str) -> list[float]:
        return [s[key] for s in summaries if s[key] is not None]

    best, last10 = known("best_accuracy"), known("last10_accuracy")
    best_round = _mean(known("best_round"))
    return Row(
        label=group.label,
        seeds=[run.config.seed for run in group.runs],
        best_accuracy=_mean(best),
        best_spread=_spread(best),
        best_round=None if best_round is None else round(best_round),
        last10_accuracy=_mean(last10),
        last10_spread=_spread(last10),
        final_accuracy=_mean(known("final_accuracy")),
        seconds_per_round=_mean(known("seconds_per_round")),
        rounds=[len(run.records) for run in group.runs],
        notes=_notes(group, ends, len(best)),
    )


def _summary(run: StoredRun, end: str) -> dict[str, Any]:
    # Computed anew even where there is a summary.json: the records are the evidence, and the two cannot disagree here.
    try:
        return summarize(run.config, run.records, end, None)
    except (KeyError, TypeError, ValueError) as error:
        what = f"a round lacks or garbles {error}"
        raise RunFolderError(f"{run.folder / 'rounds.jsonl'}: {what}; leave this run out or repeat it") from None


def _notes(group: Group, ends: Sequence[str], scored: int) -> list[str]:
    count = len(group.runs)
    notes = []
    for end in (e for e in dict.fromkeys(ends) if e != "finished"):
        these = [run for run, e in zip(group.runs, ends, strict=True) if e == end]
        where = f" in {len(these)} of {count} seeds" if count > 1 else ""
        done = _span([len(run.records) for run in these])
        left = "" if end == "diverged" else f": {done} of {_span([run.config.rounds for run in these])} rounds"
        notes.append(f"{end}{where}{left}")
    if scored < count:
        notes.append("no test accuracy" + (f" in {count - scored} of {count} seeds" if count > 1 else ""))
    seeds = [run.config.seed for run in group.runs]
    # Equal seeds are no independent repetitions: the spread would look smaller than it is.
    notes += [f"seed {seed} counts {seeds.count(seed)} times" for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    return notes


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _span(values: Sequence[int], to: str = " to ") -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}{to}{high}"


def cells(row: Row) -> list[str]:
    """Return the row as text, a cell for each of `HEADINGS`."""
    seconds = row.seconds_per_round
    return [
        row.label,
        _seeds(row.seeds),
        percent(row.best_accuracy, row.best_spread),
        "-" if row.best_round is None else str(row.best_round),
        percent(row.last10_accuracy, row.last10_spread),
        percent(row.final_accuracy),
        "-" if seconds is None else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}",
        _span(row.rounds, "-"),
    ]


def _seeds(seeds: Sequence[int]) -> str:
    """Write three or more consecutive seeds as first-last."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def rich_table(rows: Sequence[Row]) -> rich.table.Table:
    """Return the table for a terminal: the best row is bold, and notes have a column only if there are any."""
    noted = any(row.notes for row in rows)
    lines = [[*cells(row), *(["; ".join(row.notes)] if noted else [])] for row in rows]
    headings = (*HEADINGS, *(["notes"] if noted else []))
    best = frozenset(i for i, row in enumerate(rows) if row.best)
    return Table("table", "", headings, lines, [], best, frozenset({"notes"})).rich(wrap=True)


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows for JSON."""
    return [dataclasses.asdict(row) for row in rows]


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows for a spreadsheet: full precision, lists separated by blanks, notes by semicolons."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(Row)])
    for row in as_dicts(rows):
        flat = row | {key: " ".join(map(str, row[key])) for key in ("seeds", "rounds")}
        writer.writerow([*(flat | {"notes": "; ".join(row["notes"]), "best": str(row["best"]).lower()}).values()])
    return text.getvalue()
