"""From planned rows to results: run what is missing, collect all runs, and write the folder of results.

``OUT/DATA/runs`` is a study folder with the runs of all scales, so that nothing is run twice; ``OUT/DATA/tuned.json``
holds the settings that a grid found best, ``OUT/DATA/SCALE`` the results: records, tables, figures, page.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddpc.data import fetch
from feddpc.errors import DataError
from feddpc.paper import documents, figures, planned_rows, published, records, table1, tables
from feddpc.paper.claims import findings, summary
from feddpc.paper.study import PaperRow, PaperStudy, all_runs, joined
from feddpc.paper.study_spec import PaperSpec, label
from feddpc.paper.tuned import Setting, Tuned, known, setting_of, winners
from feddpc.paper.verdicts import Finding
from feddpc.report.failures import noted
from feddpc.report.page import write_page
from feddpc.report.table import Table
from feddpc.runs.stored import load
from feddpc.storage import make_folder, replace_text
from feddpc.study import RunResult, RunSpec, run_study
from feddpc.study.folder import StudyFolder
from feddpc.study.ladder import climb, keep_checkpoint
from feddpc.study.workers import Workers


@dataclass(frozen=True)
class Folders:
    """Where a reproduction keeps its files."""

    base: Path  #: of the data set
    results: Path  #: of the scale

    @classmethod
    def of(cls, out: Path, spec: PaperSpec) -> Folders:
        """Return the folders of a spec below ``out``."""
        return cls(out / spec.data, out / spec.data / spec.slug)

    @property
    def runs(self) -> Path:
        """The folder of the study that holds the runs."""
        return self.base / "runs"


def require_data(names: Sequence[str]) -> None:
    """Raise if a data set is absent, with the commands that get all that are."""
    commands = {entry.name: entry.command for entry in fetch.entries() if entry.command and entry.name in names}
    if commands:
        get = " and ".join(f"`{command}`" for command in commands.values())
        raise DataError(
            f"{', '.join(commands)}: not on this machine. Run {get} first, or try `--data digits`, which needs nothing"
        )


def collect(
    planned: Sequence[PaperRow], folders: Folders, *, report_only: bool = False, **options: Any
) -> tuple[list[PaperRow], list[RunResult], float]:
    """Run what is missing of the ``planned`` rows, with the ``options`` of :func:`run_study`.

    Return the rows with all runs that ended, the runs that did not end, and the seconds that running took.
    """
    specs = [RunSpec(row.with_seed(seed), f"{row.label} seed {seed}") for row in planned for seed in row.seeds]
    results, spent = [StudyFolder(folders.runs).read(spec) for spec in specs], 0.0
    if not report_only and not all(result.ended for result in results):
        began = time.monotonic()
        results = run_study(specs, folders.runs, **options)
        spent = time.monotonic() - began
    by_key = {result.key: result for result in results}
    runs = {key: load(result.path) for key, result in by_key.items() if result.ended}
    keys = iter(result.key for result in results)
    rows = [
        dataclasses.replace(row, runs={seed: runs[key] for seed in row.seeds if (key := next(keys)) in runs})
        for row in planned
    ]
    return rows, [result for key, result in by_key.items() if key not in runs], spent


def climb_ladder(
    spec: PaperSpec, folders: Folders, *, report_only: bool = False, **options: Any
) -> tuple[list[PaperRow], list[RunResult], bool, float]:
    """Let all settings climb, one alpha after the other; with ``report_only`` nothing is run.

    Return the settings with the runs of their highest rung, the runs that did not end, whether the ladder came to its
    end, and the seconds that running took.
    """
    study, rows, missing, complete, spent = StudyFolder(folders.runs), [], [], True, 0.0

    def run(specs: Sequence[RunSpec]) -> list[RunResult]:
        nonlocal spent
        found, began = [study.read(one) for one in specs], time.monotonic()
        if not report_only and not all(result.ended for result in found):
            found = run_study(specs, folders.runs, **options)
            spent += time.monotonic() - began
        return found

    for alpha in spec.alphas:
        make = functools.partial(planned_rows.trial, spec, alpha)
        rounds = spec.config("fedavg", Setting(published.ABLATION_RATE)).rounds
        drop = keep_checkpoint if report_only else study.drop_checkpoint
        state = climb(planned_rows.ladder(spec, alpha), rounds, spec.ladder_seeds, run, make, dropped=drop)
        rows += [planned_rows.climbed(alpha, one, mine) for one, mine in state.reached.items()]
        missing += [result for result in state.results if not result.ended]
        complete = complete and state.complete
    return rows, missing, complete, spent


def store_winners(spec: PaperSpec, rows: Sequence[PaperRow], folders: Folders) -> Tuned:
    """Store the best settings of a ladder, next to those that are stored for other alphas and methods."""
    path = folders.base / "tuned.json"
    before = Tuned.read(path) if path.is_file() else Tuned("")
    settings = {alpha: dict(chosen) for alpha, chosen in before.settings.items()}
    source = spec.ladder_words
    older = {(alpha, name) for alpha, chosen in settings.items() for name in chosen}
    if older - {(alpha, name) for alpha in spec.alphas for name in spec.rows}:
        source = before.source if before.source.startswith(source) else f"{source}; for others, {before.source}"
    for alpha in spec.alphas:
        own = [row for row in rows if row.alpha == alpha]
        chosen = {name: {by: setting_of(row) for by, row in best.items()} for name, best in winners(own).items()}
        settings[alpha] = settings.get(alpha, {}) | chosen
    tuned = Tuned(source, settings)
    tuned.write(path)
    return tuned


@dataclass(frozen=True)
class Report:
    """The results of one call."""

    study: PaperStudy
    parts: tuple[str, ...]  #: those that were asked for
    missing: list[RunResult]  #: runs that have not ended
    paths: list[Path]
    failures: list[str] = field(default_factory=list)  #: figures or pages that could not be made, and why
    left_out: list[str] = field(default_factory=list)  #: per alpha, the rows without a known setting

    @property
    def tables(self) -> list[Table]:
        """The tables of all parts."""
        return [table for part in self.parts for table in tables.of_part(self.study, part)]

    @property
    def summary(self) -> list[str]:
        """What FedDPC is above, what it is below, and what cannot be told: three lines, or none without runs."""
        return summary(self.study, self.parts)

    @property
    def findings(self) -> list[Finding]:
        """The verdicts on the claims about these parts."""
        return [finding for finding in findings(self.study) if finding.part in self.parts]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "title": self.study.title,
            "summary": self.summary,
            "tables": [table.as_dict() for table in self.tables],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "missing": self.describe_missing(),
            "left_out": self.left_out,
            "files": [str(path) for path in self.paths],
        }

    def describe_missing(self) -> list[str]:
        """Return the runs that have not ended, each with its status and the reason."""
        return [": ".join(filter(None, (r.spec.name, r.status, r.message))) for r in self.missing]


def reproduce(
    spec: PaperSpec,
    parts: Sequence[str],
    folders: Folders,
    *,
    ladder: bool = False,
    report_only: bool = False,
    workers: Workers | None = None,
    **options: Any,
) -> Report:
    """Run what the ``parts`` of a spec need, after its ``ladder`` if asked for, and write all results.

    ``workers`` and ``options`` go to :func:`run_study`; with ``report_only`` nothing is run.
    """
    options |= {"report_only": report_only, "workers": workers}
    rows: list[PaperRow] = []
    missing: list[RunResult] = []
    tuned, done, spent = known(spec.data, folders.base), tuple(parts), 0.0
    complete, left_out = True, []
    if ladder:
        rows, missing, complete, spent = climb_ladder(spec, folders, **options)
        done = ("grid", *parts)
    if not complete:
        done = ("grid",)  # an unfinished ladder has no winners
    else:
        tuned = store_winners(spec, rows, folders) if ladder else tuned
        if "table2" in parts:
            left_out = [f"alpha {a:g}: {' / '.join(map(label, names))}" for a, names in spec.left_out(tuned).items()]
        more, still_missing, seconds = collect(planned_rows.rows(parts, spec, tuned), folders, **options)
        rows, missing, spent = [*rows, *more], [*missing, *still_missing], spent + seconds
    origin = {
        "settings": f"best on {spec.select}; {tuned.source}",
        "machine": records.machine(all_runs(rows)),
        "spent": round(spent, 1),
    }
    if not report_only and workers is not None and workers.at_once > 1:
        origin["at_once"] = workers.at_once
    study = PaperStudy(spec.data, spec.slug, spec.short, rows, origin)
    if (stored := folders.results / "records.json").is_file():
        study = joined(records.read(stored), study)  # keep the rows of earlier calls
    failures: list[str] = []
    return Report(study, done, missing, write_results(study, done, folders, failures), failures, left_out)


def write_results(
    study: PaperStudy, parts: Sequence[str], folders: Folders, failures: list[str] | None = None
) -> list[Path]:
    """Write records, tables, figures and page of a study; return the paths that a person wants to see.

    With ``failures``, figures or a page that cannot be made are listed there with the reason.
    """
    folder = folders.results
    make_folder(folder)
    records.write(study, folder / "records.json")
    _write_csv([table for part in parts for table in tables.of_part(study, part)], folder)
    drawn: list[Path] = []
    with noted(folder / "figures", failures):
        drawn = figures.draw_all(study, folder, parts)
    pictures = {path.stem: path.name for path in drawn}
    replace_text(folder / "results.md", documents.section(study, parts, pictures) + "\n")
    paths = [folder / "results.md", *drawn, folder / "records.json"]
    # A page of hundreds of settings shows nothing: the grid is in the table only.
    if runs := all_runs(row for part in parts if part != "grid" for row in study.part(part)):
        title = f"Reproduction: {study.title}"
        with noted(folder / "report.html", failures):
            paths.append(write_page(folder / "report.html", runs, title=title, notes=_notes(study)))
    return paths


def write_table1(spec: PaperSpec, folders: Folders) -> list[Table]:
    """Write and return Table 1 of a data set, which needs neither runs nor data."""
    make_folder(folders.results)
    cost_tables = table1.tables(spec.data, spec.scale)
    _write_csv(cost_tables, folders.results)
    return cost_tables


def _write_csv(some: Sequence[Table], folder: Path) -> None:
    for table in some:
        replace_text(folder / f"{table.name}.csv", table.csv())


def _notes(study: PaperStudy) -> list[str]:
    """Return the notes at the top of the page."""
    missing = sum(len(row.missing) for row in study.rows)
    notes = [f"This is a shortened version of the paper's experiment: {study.short}."] if study.short else []
    return [*notes, *([f"{missing} runs are missing."] if missing else [])]
