"""The reproduction as Markdown: one section per study, and the document that holds them all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from feddpc.paper import figures, published, table1, tables
from feddpc.paper.claims import corrected, findings, summary
from feddpc.paper.presets import preset
from feddpc.paper.study import PARTS, PaperStudy, all_runs
from feddpc.paper.study_spec import label
from feddpc.paper.verdicts import compare, standing
from feddpc.storage import make_folder, replace_file, replace_text

_CAPTIONS = {
    "table2": "Best accuracy, ours next to the paper's",
    "curves": "Accuracy and loss over rounds; the band is from the lowest to the highest seed",
    "geometry": "FedDPC's mean factor (dashed: 1 + lambda) and the mean cosine of updates with the last global update",
    "ablation": "Ablation",
    "lambda": "The study of lambda",
    "step": "FedDPC's lambda, and FedAvg with its server step multiplied by 1 + lambda",
}


def section(study: PaperStudy, parts: Sequence[str], pictures: Mapping[str, str]) -> str:
    """Return a study as Markdown; ``pictures`` are addresses of figures by name."""
    blocks = [f"## {study.title[0].upper()}{study.title[1:]}"]
    if study.origin.get("machine"):
        made_with = ", ".join(f"{k} {v}" for k, v in study.origin["machine"].items())
        blocks.append(f"Run with {made_with}. {_spent(study)}".strip())
    if lines := summary(study, parts):
        blocks.append("\n".join(f"* {line}" for line in lines))
    for part in parts:
        blocks += [table.markdown() for table in tables.of_part(study, part)]
    for name, where in pictures.items():
        blocks.append(f"![{_CAPTIONS[name.partition('-alpha')[0]]}, {study.title}]({where})")
    judged = [f for f in findings(study) if f.part in parts]
    if judged:
        blocks.append(tables.findings(judged, study.title).markdown())
    return "\n\n".join(blocks)


def render(studies: Sequence[PaperStudy], images: str) -> str:
    """Return the document of ``studies``; ``images`` is the address of the folder that holds a folder for each."""
    sections = []
    for study in studies:
        parts = [part for part in PARTS if study.part(part)]
        pictures = {name: f"{images}/{_folder(study)}/{name}.png" for name in figures.available(study, parts)}
        sections.append(section(study, parts, pictures))
    local, server = table1.tables("cifar10", "paper")
    return Template((files("feddpc.paper") / "reproduction.md").read_text(encoding="utf-8")).substitute(
        summary=_summary(studies),
        sections="\n\n".join(sections),
        table1=f"{local.markdown()}\n\n{server.markdown()}",
        rates=", ".join(f"{v:g}" for v in published.RATES),
        values=", ".join(f"{v:g}" for v in published.VALUES),
    )


def write(studies: Sequence[PaperStudy], path: Path, images: Path) -> list[Path]:
    """Write the document of ``studies`` to ``path``, its figures below the folder ``images``; return all paths."""
    pictures: list[Path] = []
    for study in studies:
        make_folder(images / _folder(study))
        pictures += figures.draw_all(study, images / _folder(study), PARTS)
    for picture in pictures:
        _reduce_colors(picture)
    make_folder(path.parent)
    replace_text(path, render(studies, Path(os.path.relpath(images, path.parent)).as_posix()))
    return [path, *pictures]


def _folder(study: PaperStudy) -> str:
    return f"{study.data}-{study.scale}"


def _spent(study: PaperStudy) -> str:
    """Say how long the runs took, and the paper's rounds; nothing if that is unknown."""
    if not study.origin.get("spent"):
        return ""
    runs = all_runs(study.rows)
    rounds, time = sum(len(run.records) for run in runs), _long(study.origin["spent"])
    at_once = study.origin.get("at_once")
    more = f", {at_once} at a time: alone, a round takes less than the seconds below" if at_once else ""
    text = f"{len(runs)} runs with {rounds:,} rounds took {time}{more}."
    if study.data not in published.SECONDS:
        return text
    cells, rounds, theirs = _papers(study.data)
    return f"{text} The {rounds:,} rounds of the paper's {cells} cells take {_long(theirs)} at its seconds per round."


def _papers(data: str) -> tuple[int, int, float]:
    """Return the cells of Table 2 for a data set, their rounds, and the seconds of these on the paper's machine."""
    each, seconds = preset(data, scale="paper").rounds, published.SECONDS[data].values()
    cells = len(published.ALPHAS) * len(seconds)
    return cells, cells * each, len(published.ALPHAS) * each * sum(seconds)


def _long(seconds: float) -> str:
    """Write a time for people.

    >>> _long(90), _long(9344)
    ('1.5 minutes', '2.6 hours')
    """
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _summary(studies: Sequence[PaperStudy]) -> str:
    """Return the verdicts on the paper's claims, counted by study."""
    lines = ["| data and scale | seeds | claims that hold | do not hold | cannot be told |", "|---|" + "---:|" * 4]
    for study in studies:
        verdicts = [f.verdict for f in findings(study) if f.line is not None]
        counts = [str(verdicts.count(v)) for v in ("holds", "does not hold", "cannot be told")]
        seeds = sorted({len(row.scores) for row in study.rows if row.part != "grid"})
        many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else "".join(map(str, seeds)) or "0"
        lines.append(f"| {study.title} | {many} | {' | '.join(counts)} |")
    return "\n".join([*lines, "", *(line for study in studies for line in _orders(study)), *_together(studies)])


def _together(studies: Sequence[PaperStudy]) -> list[str]:
    """Say how long all runs on the paper's data took, and the paper's: one line, if that is known."""
    timed = [study for study in studies if study.origin.get("spent") and study.data in published.SECONDS]
    if not timed:
        return []
    runs = sum(len(all_runs(study.rows)) for study in timed)
    titles = [published.TITLES[study.data] + (f" ({study.short})" if study.short else "") for study in timed]
    devices = sorted({str(study.origin.get("machine", {}).get("device", "unknown")) for study in timed})
    theirs = [_papers(data) for data in dict.fromkeys(study.data for study in timed)]
    ours = _long(sum(study.origin["spent"] for study in timed))
    cells, reported = sum(cells for cells, _, _ in theirs), _long(sum(seconds for _, _, seconds in theirs))
    return [
        f"* Time: {runs} runs on {', '.join(titles)} took {ours}, grids and controls included (device: "
        f"{', '.join(devices)}); the rounds of the paper's {cells} cells take {reported} at its seconds per round on a "
        "Tesla V100, without its grid."
    ]


def _orders(study: PaperStudy) -> list[str]:
    """Return the best accuracies of all methods, the highest first, ours and then the paper's: a line for an alpha."""
    lines = []
    for alpha in study.alphas("table2"):
        ours = {row.label: 100 * about.mean for row in study.part("table2", alpha) if (about := row.estimate("best"))}
        theirs = {label(name): cell.accuracy for name, cell in study.reported(alpha).items()}
        mine, other = (
            " > ".join(f"{name} {value:.1f}" for name, value in sorted(column.items(), key=lambda c: -c[1]))
            for column in (ours, theirs)
        )
        whose = "the paper" if study.data == study.paper_data else f"the paper on {published.TITLES[study.paper_data]}"
        lines.append(f"* {study.title}, alpha {alpha:g}: {mine}; {whose}: {other}. {_decided(study, alpha)}".rstrip())
        if tables.hardly_begun(study, alpha):
            lines[-1] += " The grid behind it had hardly begun to learn: this order says little."
    return lines


def _decided(study: PaperStudy, alpha: float) -> str:
    """Say in words above which rows FedDPC is, and below which, as far as its seeds can tell."""
    ours, rivals = study.ours_and_rivals(alpha)
    seeds = len(ours.scores) if ours and rivals else 0
    if ours is None or seeds < 2:
        return "One seed: nothing is decided." if seeds else ""
    places = standing(compare(ours, rivals, "best", known=corrected(study, alpha, "best")))
    if not places["above"] and not places["below"]:
        return f"Over {seeds} seeds nothing is decided."
    words = [f"{place} {' / '.join(names)}" for place, names in places.items() if names]
    return f"Decided over {seeds} seeds: FedDPC is {'; '.join(words)}."


def _reduce_colors(picture: Path) -> None:
    """Reduce a picture to 256 colors, the most frequent ones unchanged: a third of the bytes in the repository."""
    from PIL import Image

    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    replace_file(picture, lambda temporary: few.save(temporary, format="PNG", optimize=True))
