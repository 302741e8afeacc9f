"""The page of some runs: one HTML file with table, interactive curves, pictures and numbers, that loads nothing.

``write_page`` takes runs (:func:`feddpc.report.tables.collect` reads them from a folder); ``write_all``
adds the picture of the curves and the table as a file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from feddpc._version import __version__
from feddpc.errors import BadInputError, RunFolderError
from feddpc.report import figures, tables
from feddpc.report.failures import noted
from feddpc.report.groups import groups, primaries, show
from feddpc.report.page import charts, sections
from feddpc.report.page.embed import embedded, numbers
from feddpc.runs.record import is_run
from feddpc.runs.stored import StoredRun
from feddpc.storage import explain_os_errors, replace_text

__all__ = ["refuse_to_overwrite", "render", "write_all", "write_page"]

_MARK = '<meta name="generator" content="feddpc">'
_SCRIPTS = ("data.js", "look.js", "curves.js", "pictures.js", "table.js", "page.js")


def write_page(path: Path, runs: Sequence[StoredRun], *, title: str | None = None, notes: Sequence[str] = ()) -> Path:
    """Write the page of ``runs`` to ``path``: a single file that works offline, in the dark, in print and on a phone.

    Args:
        path: the file to write.
        runs: finished or not, in any number; those that differ in nothing but the seed are drawn together.
        title: by default, what the runs are.
        notes: sentences that a reader must see first, such as what is missing; shown above the results.
    """
    if not runs:
        raise BadInputError(f"no runs to report in {path}: give at least one")
    replace_text(path, render(runs, title=title, notes=notes))
    return path


def write_all(
    runs: Sequence[StoredRun],
    folder: Path,
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    failures: list[str] | None = None,
) -> list[Path]:
    """Write ``curves.png``, ``table.csv`` and ``report.html`` into ``folder`` and return their paths.

    With ``failures``, a file that cannot be written is listed there with the reason, and the others are written.
    """
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], object]] = {
        "curves.png": lambda path: figures.save(figures.curves(runs), path),
        "table.csv": lambda path: replace_text(path, tables.as_csv(tables.rows(runs))),
        "report.html": lambda path: write_page(path, runs, title=title, notes=notes),
    }
    written = []
    for name, write in writers.items():
        with noted(folder / name, failures):
            write(folder / name)
            written.append(folder / name)
    return written


def refuse_to_overwrite(folder: Path) -> None:
    """Raise if the report's files in ``folder`` are not ours: some are there, and no page of ours beside them."""
    if is_run(folder) or (folder / "compare.json").is_file():
        return
    existing = [folder / name for name in ("report.html", "table.csv", "curves.png") if (folder / name).exists()]
    with explain_os_errors(folder):
        if existing and not _is_ours(folder / "report.html"):
            raise RunFolderError(f"{existing[0]} is not from an earlier report and would be overwritten: move it away")


def _is_ours(page: Path) -> bool:
    if not page.is_file():
        return False
    with page.open(encoding="utf-8", errors="replace") as handle:
        return _MARK in handle.read(2000)


def render(runs: Sequence[StoredRun], *, title: str | None = None, notes: Sequence[str] = ()) -> str:
    """Return the page as HTML text; the same runs give the same text."""
    every = groups(runs)
    known = numbers(runs)
    script, library = "\n\n".join(_part(name) for name in _SCRIPTS), _plotly()
    left_out = known["left_out"] and [*known["left_out"], "The run folders hold all of it."]
    return Template(_part("page.html")).substitute(
        mark=_MARK,
        title=escape(show(title or sections.title(every))),
        lead=escape(sections.lead(every)),
        remarks=sections.remarks([*notes, *left_out]),
        style=_part("page.css"),
        # The browser runs scripts with these hashes and no others, so nothing in a run folder can become a program.
        allowed=f"{_hash(library)} {_hash(script)}",
        table=sections.results(tables.rows(runs), every),
        best=escape(tables.best_words(primaries(every))),
        curves=charts.curves(known, runs),
        notes=charts.notes(runs),
        fairness=charts.fairness(known, runs),
        schedule=charts.schedule(known, runs),
        holdings=charts.holdings(known, runs),
        costs=sections.costs(every),
        configuration=sections.configuration(every),
        runs=sections.run_list(every),
        version=escape(__version__),
        data=embedded(known),
        library=library,
        script=script,
    )


def _part(name: str) -> str:
    return (files("feddpc.report.page") / name).read_text(encoding="utf-8").strip()


def _plotly() -> str:
    """Return the chart library that the page carries."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInputError("the page needs Plotly for its charts: pip install plotly") from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
