"""What a person or a program sees of a reproduction: tables, findings, what is missing, where the rest is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from feddpc.paper.sheet import Sheet
    from feddpc.paper.verdicts import Finding
    from feddpc.paper.work import Report

#: Columns that the tables need: a folded table cannot be read.
WIDTH = 150
#: Where findings begin, behind the verdict.
INDENT = 16
#: How many runs that are not there are named.
NAMED = 20


def show(report: Report) -> None:
    """Print a report."""
    from rich.padding import Padding
    from rich.text import Text

    from feddpc.paper import documents

    for part in report.parts:
        for sheet in documents.sheets(report.study, part):
            show_sheet(sheet)
    console, judged = _console(), _findings(report)
    if judged:
        console.print(f"\nWhat holds, {report.study.title}", style="bold", highlight=False)
    for finding in judged:
        where = "" if finding.line is None else f" (paper.tex, line {finding.line})"
        console.print(f"{finding.verdict + ':':{INDENT}}{finding.claim}{where}", highlight=False, markup=False)
        console.print(Padding(Text(finding.numbers, style="dim"), (0, 0, 0, INDENT), expand=False))
    console.print()
    for path in report.paths:
        console.print(str(path), highlight=False, markup=False)
    if report.missing:
        console.print(f"\n{len(report.missing)} runs are missing; the same command goes on with them:", style="yellow")
        for text in missing(report)[:NAMED]:
            console.print(f"  {text}", highlight=False, markup=False)
        if len(report.missing) > NAMED:
            console.print(f"  and {len(report.missing) - NAMED} more")


def warn_of_failures(report: Report, target: str) -> None:
    """Say in one line which figures or pages are not there, and how to get them later."""
    import typer

    remedy = f"the records are complete, the same `feddpc reproduce {target}` with --report-only draws them later"
    typer.echo(f"warning: {'; '.join(report.failures)}; {remedy}", err=True)


def show_sheet(sheet: Sheet) -> None:
    """Print a table, its title above and its notes below."""
    console = _console()
    console.print(f"\n{sheet.title}", style="bold", highlight=False, markup=False)
    console.print(sheet.rich())
    for note in sheet.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def as_dict(report: Report) -> dict[str, Any]:
    """Return a report for JSON."""
    from feddpc.paper import documents

    return {
        "title": report.study.title,
        "tables": [sheet_dict(sheet) for part in report.parts for sheet in documents.sheets(report.study, part)],
        "findings": [dataclasses.asdict(finding) for finding in _findings(report)],
        "missing": missing(report),
        "files": [str(path) for path in report.paths],
    }


def missing(report: Report) -> list[str]:
    """Return what has not ended, and why."""
    return [": ".join(filter(None, (o.item.name, o.status, o.message))) for o in report.missing]


def sheet_dict(sheet: Sheet) -> dict[str, Any]:
    """Return a table for JSON."""
    return {"title": sheet.title, "headings": sheet.headings, "rows": sheet.rows, "notes": sheet.notes}


def _findings(report: Report) -> list[Finding]:
    from feddpc.paper.claims import findings

    return [finding for finding in findings(report.study) if finding.part in report.parts]


def _console() -> Console:
    from rich.console import Console

    return Console(width=max(Console().width, WIDTH))
