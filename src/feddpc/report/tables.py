"""The table of a comparison: one row per configuration, mean and spread over its seeds."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.errors import RunFolderError
from feddpc.report.groups import SeedGroup, groups, status
from feddpc.report.table import Table
from feddpc.runs.record import is_run
from feddpc.runs.stored import StoredRun, load
from feddpc.storage import explain_os_errors
from feddpc.tasks.metrics import Metric

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One configuration over its seeds: the values of its primary metric on the test set; None is what is not known."""

    label: str
    seeds: list[int]
    metric: Metric
    best: float | None
    best_spread: float | None  #: sample standard deviation; None for one seed
    best_round: int | None  #: mean of the seeds' best rounds
    last10: float | None
    last10_spread: float | None
    final: float | None
    seconds_per_round: float | None
    rounds: list[int]  #: rounds done, per seed
    notes: list[str]  #: what a reader must know before comparing
    leads: bool = False  #: whether no other row with this metric has a better ``best``


def best_words(metrics: Iterable[Metric]) -> str:
    """Say what the best value is.

    >>> best_words([Metric("accuracy")])
    'highest test accuracy'
    """
    return " or ".join(f"{metric.superlative} test {metric.words}" for metric in metrics)


def headings(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Return the heading of every column but the notes, and what it means."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    unit = metrics[0].heading if len(metrics) == 1 else ""
    words = " or ".join(metric.words for metric in metrics)
    best = best_words(metrics)
    return {
        "method": "the method, and what sets it apart from the others here",
        "seeds": "the seeds that the row is the mean of",
        f"best {unit}".rstrip(): f"{best} of any round, mean over seeds ± sample standard deviation",
        "round": f"the round of the {best}, mean over seeds",
        f"last 10 {unit}".rstrip(): f"test {words} over the last ten rounds evaluated, mean ± deviation as before",
        f"final {unit}".rstrip(): f"test {words} of the last round evaluated, mean over seeds",
        "s/round": "seconds per round, mean over seeds and rounds but the first",
        "rounds": "rounds done",
    }


def collect(folder: Path, damage: list[str] | None = None) -> list[StoredRun]:
    """Read the run in ``folder``, or all runs below it, in the order of the comparison or sweep they belong to.

    ``compare.json``, or ``order.json`` of a sweep, holds ``{"runs": ["feddpc-seed0", ...]}``; other folders are sorted
    by name. A run it names that is not there yet is left out. What
    is broken is an error; with ``damage`` it is left out, and said there together with the runs that are still to come.
    """
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}: give one that `feddpc run` or `feddpc compare` wrote")
    runs = []
    for path in (p for p in _below(folder, damage) if p == folder or _ours(p)):
        try:
            run = load(path, damage)
            runs.append(run if damage is None else _sound(run, damage))
        except RunFolderError as error:
            if damage is None or path == folder:
                raise
            damage.append(f"{error}; this run is left out")
    if damage is not None:  # local paths are not shown: a page may be sent to others
        damage[:] = [said.replace(f"{folder}{os.sep}", "") for said in damage]
    if not runs:
        raise RunFolderError(
            f"{folder} holds no run that can be read: give a folder that `feddpc run` or `feddpc compare` wrote"
            + (f" ({damage[0]})" if damage else "")
        )
    return runs


def _sound(run: StoredRun, damage: list[str]) -> StoredRun:
    """Return a run without the records from the first one on that lacks what every record has."""
    key = run.primary.key()
    # Rounds of a federation that came before its first evaluation do not know what is measured.
    records = [{key: None, **record} if "nodes" in record else record for record in run.records]
    run = dataclasses.replace(run, records=records)
    for i, record in enumerate(records):
        known = [record.get(name, "") for name in (key, "seconds")]
        if not all(v is None or isinstance(v, int | float) for v in known) or known[1] is None:
            where = f"{run.folder / 'rounds.jsonl'}, line {i + 1}"
            missing = f"{run.primary.words} or seconds are missing"
            damage.append(f"{where}: {missing}; the rounds from there on are left out")
            return dataclasses.replace(run, records=records[:i])
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


def rows(runs: Sequence[StoredRun]) -> list[ResultRow]:
    """Return one row per configuration, in the order in which configurations first appear."""
    table = [_row(group) for group in groups(runs)]
    metrics = {row.metric for row in table}
    best = {m: m.pick(row.best for row in table if row.metric == m and row.best is not None) for m in metrics}
    table = [dataclasses.replace(row, leads=row.best is not None and row.best == best[row.metric]) for row in table]
    if len(metrics) > 1:  # then the headings have no unit
        table = [dataclasses.replace(row, label=f"{row.label}: {row.metric.title}") for row in table]
    return table


def _row(group: SeedGroup) -> ResultRow:
    ends = [status(run) for run in group.runs]
    summaries = [_summary(run, end) for run, end in zip(group.runs, ends, strict=True)]

    def known(key: str) -> list[float]:
        return [s[key] for s in summaries if s.get(key) is not None]

    name = group.metric.name
    best, last10 = known(f"best_{name}"), known(f"last10_{name}")
    best_round = _mean(known("best_round"))
    return ResultRow(
        label=group.label,
        seeds=[run.config.seed for run in group.runs],
        metric=group.metric,
        best=_mean(best),
        best_spread=_spread(best),
        best_round=None if best_round is None else round(best_round),
        last10=_mean(last10),
        last10_spread=_spread(last10),
        final=_mean(known(f"final_{name}")),
        seconds_per_round=_mean(known("seconds_per_round")),
        rounds=[len(run.records) for run in group.runs],
        notes=_notes(group, ends, len(best)),
    )


def _summary(run: StoredRun, end: str) -> dict[str, Any]:
    # Computed again even where there is a summary.json: the records are the evidence, and the two cannot disagree here.
    try:
        return run.summarize(end)
    except (KeyError, TypeError, ValueError) as error:
        what = f"a round lacks or garbles {error}"
        raise RunFolderError(f"{run.folder / 'rounds.jsonl'}: {what}; leave this run out or repeat it") from None


def _notes(group: SeedGroup, ends: Sequence[str], scored: int) -> list[str]:
    count = len(group.runs)
    notes = []
    for end in (e for e in dict.fromkeys(ends) if e != "finished"):
        these = [run for run, e in zip(group.runs, ends, strict=True) if e == end]
        where = f" in {len(these)} of {count} seeds" if count > 1 else ""
        done = _span([len(run.records) for run in these])
        left = "" if end == "diverged" else f": {done} of {_span([run.config.rounds for run in these])} rounds"
        notes.append(f"{end}{where}{left}")
    if scored < count:
        notes.append(f"no test {group.metric.words}" + (f" in {count - scored} of {count} seeds" if count > 1 else ""))
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


def cells(row: ResultRow) -> list[str]:
    """Return the row as text, a cell for each of `headings`."""
    seconds, text = row.seconds_per_round, row.metric.text
    return [
        row.label,
        _seeds(row.seeds),
        text(row.best, row.best_spread),
        "-" if row.best_round is None else str(row.best_round),
        text(row.last10, row.last10_spread),
        text(row.final),
        "-" if seconds is None else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}",
        _span(row.rounds, "-"),
    ]


def _seeds(seeds: Sequence[int]) -> str:
    """Write three or more consecutive seeds as first-last."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def make_table(rows: Sequence[ResultRow]) -> Table:
    """Return the rows as a table: the best one is bold, and notes have a column only if there are any."""
    noted = any(row.notes for row in rows)
    lines = [[*cells(row), *(["; ".join(row.notes)] if noted else [])] for row in rows]
    names = (*headings(rows), *(["notes"] if noted else []))
    best = frozenset(i for i, row in enumerate(rows) if row.leads)
    return Table("table", "", names, lines, [], best, frozenset({"notes"}))


def rich_table(rows: Sequence[ResultRow]) -> rich.table.Table:
    """Return the table for a terminal."""
    return make_table(rows).rich(wrap=True)


def as_dicts(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return the rows for JSON; the name of the metric is part of the keys, ``best_accuracy``."""
    return [_as_dict(row) for row in rows]


def _as_dict(row: ResultRow) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    of_metric = {key: f"{key}_{row.metric.name}" for key in ("best", "last10", "final")}
    named = {of_metric.get(key, key): value for key, value in values.items() if key != "leads"}
    return named | {"metric": row.metric.name, "best": row.leads}


def as_csv(rows: Sequence[ResultRow]) -> str:
    """Return the rows for a spreadsheet: full precision, lists separated by blanks, notes by semicolons."""
    lines = []
    for row in as_dicts(rows):
        flat = row | {key: " ".join(map(str, row[key])) for key in ("seeds", "rounds")}
        lines.append(flat | {"notes": "; ".join(row["notes"]), "best": str(row["best"]).lower()})
    names = tuple(dict.fromkeys(name for line in lines for name in line))
    values = [[line.get(name) for name in names] for line in lines]
    return Table("table", "", names, [["" if v is None else str(v) for v in row] for row in values]).csv()
