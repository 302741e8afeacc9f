"""From rows to results: run what is missing, gather what is there, keep it in the folder of the study.

``OUT/DATA/runs`` holds the runs of all scales (a sweep, so nothing is run twice), ``OUT/DATA/tuned.json`` what a grid
found, ``OUT/DATA/SCALE`` the results: records, tables, figures, page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from feddpc.data import fetch
from feddpc.errors import DataError
from feddpc.paper import documents, figures, plan, records
from feddpc.paper.question import Question
from feddpc.paper.study import Line, Row, Study, all_runs, joined
from feddpc.paper.tuned import Tuned, known, setting_of, winners
from feddpc.report.failures import noted
from feddpc.report.page import write_page
from feddpc.runs.record import load
from feddpc.runs.runner import Stop
from feddpc.storage import explain_os_errors, replace_text
from feddpc.study import Item, Outcome, execute
from feddpc.study.scheduler import OnProgress
from feddpc.study.store import Store
from feddpc.study.workers import Workers


@dataclass(frozen=True)
class Place:
    """Where a study is kept."""

    base: Path  #: of the data set
    results: Path  #: of the scale

    @classmethod
    def of(cls, out: Path, question: Question) -> Place:
        """Return the place of a question below ``out``."""
        return cls(out / question.data, out / question.data / question.slug)

    @property
    def runs(self) -> Path:
        """The folder of the sweep."""
        return self.base / "runs"


@dataclass(frozen=True)
class Labour:
    """How runs are made; ``look_only`` makes none."""

    look_only: bool = False
    workers: Workers | None = None
    on_progress: OnProgress | None = None
    stop: Stop | None = None


def require_data(names: Sequence[str]) -> None:
    """Raise if a data set is absent, with the commands that get all that are."""
    commands = {entry.name: entry.command for entry in fetch.entries() if entry.command and entry.name in names}
    if commands:
        get = " and ".join(f"`{command}`" for command in commands.values())
        raise DataError(
            f"{', '.join(commands)}: not on this machine. Run {get} first, or try `--data digits`, which needs nothing"
        )


def gather(lines: Sequence[Line], place: Place, labour: Labour) -> tuple[list[Row], list[Outcome], float]:
    """Run what is missing of ``lines``; return their rows with all runs that have ended, what has not, and seconds."""
    wanted = [Item(line.of(seed), f"{line.label} seed {seed}") for line in lines for seed in line.seeds]
    outcomes, spent = [Store(place.runs).read(item) for item in wanted], 0.0
    if not labour.look_only and not all(outcome.ended for outcome in outcomes):
        began = time.monotonic()
        outcomes = execute(wanted, place.runs, workers=labour.workers, on_progress=labour.on_progress, stop=labour.stop)
        spent = time.monotonic() - began
    found = {outcome.key: outcome for outcome in outcomes}
    runs = {key: load(outcome.path) for key, outcome in found.items() if outcome.ended}
    keys = iter(outcome.key for outcome in outcomes)
    rows = [Row(line, {seed: runs[key] for seed in line.seeds if (key := next(keys)) in runs}) for line in lines]
    return rows, [outcome for key, outcome in found.items() if key not in runs], spent


def keep_winners(question: Question, rows: Sequence[Row], place: Place) -> Tuned:
    """Write down the best settings of a grid, beside those of other alphas and methods that are already there."""
    path = place.base / "tuned.json"
    before = Tuned.read(path) if path.is_file() else Tuned("")
    settings = {alpha: dict(chosen) for alpha, chosen in before.settings.items()}
    source, older = question.grid_words, {(alpha, name) for alpha, chosen in settings.items() for name in chosen}
    older -= {(alpha, name) for alpha in question.alphas for name in question.rows}
    if older:  # of other methods or alphas
        source = before.source if before.source.startswith(source) else f"{source}; for others, {before.source}"
    for alpha in question.alphas:
        mine = [row for row in rows if row.line.alpha == alpha]
        chosen = {name: {by: setting_of(row) for by, row in found.items()} for name, found in winners(mine).items()}
        settings[alpha] = settings.get(alpha, {}) | chosen
    tuned = Tuned(source, settings)
    tuned.write(path)
    return tuned


@dataclass(frozen=True)
class Report:
    """What a call came to."""

    study: Study
    parts: tuple[str, ...]  #: those that were asked for
    missing: list[Outcome]  #: runs that have not ended
    paths: list[Path]
    failures: list[str] = field(default_factory=list)  #: figures or pages that could not be made, and why


def carry_out(question: Question, parts: Sequence[str], place: Place, labour: Labour, *, grid: bool) -> Report:
    """Run what the ``parts`` of a question need, after its ``grid`` if asked for, and write all results."""
    rows: list[Row] = []
    missing: list[Outcome] = []
    tuned, done, spent = known(question.data, place.base), tuple(parts), 0.0
    if grid:
        rows, missing, spent = gather(plan.grid(question), place, labour)
        done = ("grid", *parts)
    if any(outcome.status == "missing" for outcome in missing):
        done = ("grid",)  # before the grid is through it has no winners
    else:
        tuned = keep_winners(question, rows, place) if grid else tuned
        more, still, longer = gather(plan.lines(parts, question, tuned), place, labour)
        rows, missing, spent = [*rows, *more], [*missing, *still], spent + longer
    origin = {
        "settings": f"best on {question.select}; {tuned.source}",
        "machine": records.machine(all_runs(rows)),
        "spent": round(spent, 1),
    }
    if not labour.look_only and labour.workers is not None and labour.workers.at_once > 1:
        origin["at_once"] = labour.workers.at_once
    study = Study(question.data, question.slug, question.short, rows, origin)
    if (kept := place.results / "records.json").is_file():
        study = joined(records.read(kept), study)  # with what earlier calls asked for
    failures: list[str] = []
    return Report(study, done, missing, write_results(study, done, place, failures), failures)


def write_results(study: Study, parts: Sequence[str], place: Place, failures: list[str] | None = None) -> list[Path]:
    """Write records, tables, figures and page of a study; return the paths that a person wants to see.

    With ``failures``, figures or a page that cannot be made are listed there with the reason.
    """
    folder = place.results
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    records.write(study, folder / "records.json")
    for part in parts:
        for sheet in documents.sheets(study, part):
            replace_text(folder / f"{sheet.name}.csv", sheet.csv())
    drawn: list[Path] = []
    with noted(folder / "figures", failures):
        drawn = figures.draw_all(study, folder, parts)
    pictures = {path.stem: path.name for path in drawn}
    replace_text(folder / "results.md", documents.section(study, parts, pictures) + "\n")
    paths = [folder / "results.md", *drawn, folder / "records.json"]
    # A page of hundreds of settings shows nothing: the grid is for the table.
    if runs := all_runs(row for part in parts if part != "grid" for row in study.part(part)):
        title = f"Reproduction: {study.title}"
        with noted(folder / "report.html", failures):
            paths.append(write_page(folder / "report.html", runs, title=title, notes=_notes(study)))
    return paths


def _notes(study: Study) -> list[str]:
    """Return what a reader of the page must know first."""
    missing = sum(len(row.missing) for row in study.rows)
    notes = [f"This is a shortened version of the paper's experiment: {study.short}."] if study.short else []
    return [*notes, *([f"{missing} runs are missing."] if missing else [])]
