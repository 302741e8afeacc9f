"""The rows of a reproduction with the runs that belong to them, and what is measured on each run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc.config import Config
from feddpc.paper import published
from feddpc.paper.significance import Estimate, estimate
from feddpc.report.groups import SeedGroup, status
from feddpc.runs.stored import StoredRun

#: The parts that have runs, in the order in which they are shown; ``grid`` is the tuning.
PARTS = ("grid", "table2", "figure4", "figure5")
#: Measures that are shares from 0 to 1.
SHARES = ("best", "last10", "mean", "validation", "validated")


@dataclass(frozen=True)
class PaperRow:
    """One row of a table: a configuration without its seed, and the runs that have ended, by seed."""

    part: str  #: table2, figure4, figure5 or grid
    alpha: float
    name: str  #: unique within part and alpha
    label: str  #: for people
    config: Config
    seeds: tuple[int, ...]  #: those that were asked for
    runs: dict[int, StoredRun] = field(default_factory=dict)

    def with_seed(self, seed: int) -> Config:
        """Return the configuration of one seed."""
        return dataclasses.replace(self.config, seed=seed)

    @property
    def missing(self) -> list[int]:
        """The seeds that were asked for and have not ended."""
        return [seed for seed in self.seeds if seed not in self.runs]

    @property
    def diverged(self) -> list[int]:
        """The seeds whose run ended because the model was no longer finite."""
        return [seed for seed, run in self.runs.items() if status(run) == "diverged"]

    @functools.cached_property
    def scores(self) -> dict[int, dict[str, float]]:
        """What each run achieved; a run without any test accuracy is left out."""
        scores = {seed: score(run) for seed, run in self.runs.items()}
        return {seed: measures for seed, measures in scores.items() if measures}

    def values(self, measure: str) -> dict[int, float]:
        """Return one measure by seed, where it is known."""
        return {seed: measures[measure] for seed, measures in self.scores.items() if measure in measures}

    def estimate(self, measure: str) -> Estimate | None:
        """Return mean and spread of a measure; None if no run has it. Intervals of shares stay within 0 and 1."""
        values = list(self.values(measure).values())
        about = estimate(values) if values else None
        return about.within(0.0, 1.0) if about and measure in SHARES else about

    @property
    def group(self) -> SeedGroup:
        """The row in the form that figures take."""
        return SeedGroup(self.label, list(self.runs.values()))


@dataclass(frozen=True)
class PaperStudy:
    """Everything that was run on one data set at one scale."""

    data: str
    scale: str
    short: str  #: what was cut from the paper's experiment; empty if nothing
    rows: list[PaperRow] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)  #: where settings came from, what it ran on, seconds it took

    @property
    def title(self) -> str:
        """Data set and scale, for every table and figure: a shortened version says that it is one."""
        name = published.TITLES[self.data]
        kinds = sorted({row.config.precision for row in self.rows} - {Config.precision})
        precision = f", {' and '.join(kinds)}" if kinds else ""
        return f"{name}, shortened: {self.short}{precision}" if self.short else f"{name}, the paper's scale{precision}"

    @property
    def paper_data(self) -> str:
        """The data set whose reported numbers are shown next to ours."""
        return "cifar10" if self.data == "digits" else self.data

    def reported(self, alpha: float) -> dict[str, published.Reported]:
        """Return the paper's column of Table 2 for this data set; that of its first alpha for one it has not."""
        return published.TABLE2.get((self.paper_data, alpha)) or published.TABLE2[self.paper_data, published.ALPHAS[0]]

    def part(self, part: str, alpha: float | None = None) -> list[PaperRow]:
        """Return the rows of a part, in their order."""
        return [r for r in self.rows if r.part == part and alpha in (None, r.alpha)]

    def scored(self, part: str, alpha: float) -> dict[str, PaperRow]:
        """Return the rows of a part that have a run with a test accuracy, by name."""
        return {row.name: row for row in self.part(part, alpha) if row.scores}

    def alphas(self, part: str) -> list[float]:
        """Return the alphas of a part, the smallest first."""
        return sorted({row.alpha for row in self.part(part)})

    def ours_and_rivals(self, alpha: float) -> tuple[PaperRow | None, list[PaperRow]]:
        """Return FedDPC's row of Table 2, None if it has no run, and all other rows."""
        rows = self.part("table2", alpha)
        ours = next((row for row in rows if row.name == "feddpc" and row.runs), None)
        return ours, [row for row in rows if row is not ours]


def joined(first: PaperStudy, then: PaperStudy) -> PaperStudy:
    """Return the rows of two studies of the same thing; where both have a row, that of ``then``.

    A later ladder of a row of Table 2 replaces an earlier one: the settings of the two cannot be compared.
    """
    again = {(row.alpha, tuned_row(row.name)) for row in then.part("grid")}
    kept = [r for r in first.rows if r.part != "grid" or (r.alpha, tuned_row(r.name)) not in again]
    rows = {(row.part, row.alpha, row.name): row for row in (*kept, *then.rows)}
    ordered = sorted(rows.values(), key=lambda row: PARTS.index(row.part))
    origin = first.origin | then.origin
    if "machine" in first.origin and "machine" in then.origin:
        before = first.origin["machine"]
        origin["machine"] = {k: v for k, v in then.origin["machine"].items() if before.get(k) == v}
    origin.pop("spent", None)
    if "spent" in first.origin and "spent" in then.origin:  # otherwise it is unknown
        origin["spent"] = round(first.origin["spent"] + then.origin["spent"], 1)
    return dataclasses.replace(then, rows=ordered, origin=origin)


def tuned_row(name: str) -> str:
    """Return the row of Table 2 that a setting of a ladder is a candidate for: its name before the values.

    >>> tuned_row("fedprox lr=0.1 mu=1"), tuned_row("fedavg x2")
    ('fedprox', 'fedavg x2')
    """
    return name.partition(" lr=")[0]


def all_runs(rows: Iterable[PaperRow]) -> list[StoredRun]:
    """Return the runs of ``rows``, each once."""
    return list({id(run): run for row in rows for run in row.runs.values()}.values())


def accuracies(run: StoredRun) -> list[float | None]:
    """Return the test accuracy of every round, None where the round was not evaluated."""
    return [record["test_accuracy"] for record in run.records]


def score(run: StoredRun) -> dict[str, float]:
    """Return the measures of a run that are known, none without a test accuracy; accuracies are shares from 0 to 1."""
    summary = run.summarize(status(run))
    if summary["best_accuracy"] is None:
        return {}
    measures = {
        "best": summary["best_accuracy"],
        "best_round": summary["best_round"],
        "last10": summary["last10_accuracy"],
        "mean": _mean(accuracies(run)),  # high if accuracy rises early
        "loss": _mean([record.get("train_loss") for record in run.records]),  # low if it falls early
        "seconds": summary["seconds_per_round"],
        "validation": summary.get("validation_accuracy"),  # the highest on samples held out of training
        "validated": summary.get("validated_accuracy"),  # test accuracy in the round that those samples choose
        "scale": _mean([record.get("mean_scale") for record in run.records]),  # FedDPC's factor
        "cosine": _mean([record.get("mean_cosine") for record in run.records[1:]]),  # round 1 has no last update
    }
    return {name: float(value) for name, value in measures.items() if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
