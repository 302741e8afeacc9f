"""A study: the rows of a reproduction with the runs that belong to them, and what is measured on each run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc.config import Config
from feddpc.paper import published
from feddpc.paper.statistics import Estimate, estimate
from feddpc.report.groups import Group, status
from feddpc.runs.record import StoredRun


@dataclass(frozen=True)
class Line:
    """One row of a part before it is run: what it is called, and its configuration but for the seed."""

    part: str  #: table2, figure4, figure5 or grid
    alpha: float
    name: str  #: unique within part and alpha
    label: str  #: for people
    config: Config
    seeds: tuple[int, ...]

    def of(self, seed: int) -> Config:
        """Return the configuration of one seed."""
        return dataclasses.replace(self.config, seed=seed)


@dataclass(frozen=True)
class Score:
    """What one run achieved; accuracies are shares from 0 to 1."""

    best: float
    best_round: float
    last10: float
    mean: float  #: test accuracy, mean over all rounds: high if it rises early
    loss: float  #: training loss, mean over all rounds: low if it falls early
    seconds: float
    validation: float  #: highest accuracy on samples held out of training; NaN if there were none
    validated: float  #: test accuracy in the round that those samples choose
    scale: float  #: FedDPC's mean factor, mean over rounds; NaN for other methods
    cosine: float  #: of updates with the last global update, likewise


@dataclass(frozen=True)
class Row:
    """A line with the runs that are there, by seed."""

    line: Line
    runs: dict[int, StoredRun]

    @property
    def missing(self) -> list[int]:
        """The seeds that were asked for and have not ended."""
        return [seed for seed in self.line.seeds if seed not in self.runs]

    @property
    def diverged(self) -> list[int]:
        """The seeds whose run ended because the model was no longer finite."""
        return [seed for seed, run in self.runs.items() if status(run) == "diverged"]

    @functools.cached_property
    def scores(self) -> dict[int, Score]:
        """What each run achieved; a run that never had a test accuracy is left out."""
        found = {seed: score(run) for seed, run in self.runs.items()}
        return {seed: s for seed, s in found.items() if s is not None}

    def of(self, measure: str) -> dict[int, float]:
        """Return one measure by seed, where it is known."""
        values = {seed: float(getattr(s, measure)) for seed, s in self.scores.items()}
        return {seed: v for seed, v in values.items() if math.isfinite(v)}

    def about(self, measure: str) -> Estimate | None:
        """Return mean and spread of a measure; None if no run has it."""
        values = list(self.of(measure).values())
        return estimate(values) if values else None

    @property
    def group(self) -> Group:
        """The row as figures want it."""
        return Group(self.line.label, list(self.runs.values()))


@dataclass(frozen=True)
class Study:
    """Everything that was run on one data set at one scale."""

    data: str
    scale: str
    short: str  #: what was cut from the paper's experiment; empty if nothing
    rows: list[Row] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)  #: where settings came from, what it ran on, seconds it took

    @property
    def title(self) -> str:
        """Data set and scale, for every table and figure: a shortened version says that it is one."""
        name = published.TITLES[self.data]
        kinds = sorted({row.line.config.precision for row in self.rows} - {Config.precision})
        exact = f", {' and '.join(kinds)}" if kinds else ""
        return f"{name}, shortened: {self.short}{exact}" if self.short else f"{name}, the paper's scale{exact}"

    @property
    def paper_data(self) -> str:
        """The data set whose reported numbers are shown next to ours."""
        return "cifar10" if self.data == "digits" else self.data

    def reported(self, alpha: float) -> dict[str, published.Reported]:
        """Return the paper's column of Table 2 for this data set; that of its first alpha for one it has not."""
        return published.TABLE2.get((self.paper_data, alpha)) or published.TABLE2[self.paper_data, published.ALPHAS[0]]

    def part(self, part: str, alpha: float | None = None) -> list[Row]:
        """Return the rows of a part, in their order."""
        return [r for r in self.rows if r.line.part == part and alpha in (None, r.line.alpha)]

    def alphas(self, part: str) -> list[float]:
        """Return the alphas of a part, the smallest first."""
        return sorted({row.line.alpha for row in self.part(part)})

    def find(self, part: str, alpha: float, name: str) -> Row | None:
        """Return one row, or None if it is not there or has no run."""
        return next((r for r in self.part(part, alpha) if r.line.name == name and r.runs), None)


def joined(first: Study, then: Study) -> Study:
    """Return the rows of two studies of the same thing; where both have a row, that of ``then``.

    A grid of other rounds takes the place of an earlier one: its settings cannot be compared with those.
    """
    lengths = {(row.line.alpha, row.line.config.method): row.line.config.rounds for row in then.part("grid")}
    rows = {
        (row.line.part, row.line.alpha, row.line.name): row
        for row in (*first.rows, *then.rows)
        if row.line.part != "grid"
        or lengths.get((row.line.alpha, row.line.config.method), row.line.config.rounds) == row.line.config.rounds
    }
    origin = first.origin | then.origin
    if "machine" in first.origin and "machine" in then.origin:
        before = first.origin["machine"]
        origin["machine"] = {k: v for k, v in then.origin["machine"].items() if before.get(k) == v}
    origin.pop("spent", None)
    if "spent" in first.origin and "spent" in then.origin:  # otherwise it is unknown
        origin["spent"] = round(first.origin["spent"] + then.origin["spent"], 1)
    return dataclasses.replace(then, rows=list(rows.values()), origin=origin)


def all_runs(rows: Iterable[Row]) -> list[StoredRun]:
    """Return the runs of ``rows``, each once."""
    return list({id(run): run for row in rows for run in row.runs.values()}.values())


def score(run: StoredRun) -> Score | None:
    """Measure a run; None if it has no test accuracy."""
    summary = run.summarize(status(run))
    if summary["best_accuracy"] is None:
        return None
    return Score(
        best=summary["best_accuracy"],
        best_round=summary["best_round"],
        last10=summary["last10_accuracy"],
        seconds=summary["seconds_per_round"],
        validation=summary.get("validation_accuracy", math.nan),
        validated=summary.get("validated_accuracy", math.nan),
        mean=_mean(run.records, "test_accuracy"),
        loss=_mean(run.records, "train_loss"),
        scale=_mean(run.records, "mean_scale"),
        cosine=_mean(run.records[1:], "mean_cosine"),  # round 1 has no last update
    )


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    values = [r[key] for r in records if r.get(key) is not None]
    return math.fsum(values) / len(values) if values else math.nan
