"""The reproduction as Markdown: one section per study, and the document that holds them all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from feddpc.paper import figures, published, table1, tables
from feddpc.paper.claims import corrected, findings, summary
from feddpc.paper.presets import preset
from feddpc.paper.study import PARTS, PaperStudy, all_runs
from feddpc.paper.study_spec import ROWS, label
from feddpc.paper.verdicts import compare, standing
from feddpc.storage import make_folder, replace_file, replace_text

#: The page of the costs, and the link back to the main page.
COSTS = "reproduction-costs.md"
_BACK = "Made from records by `feddpc reproduce docs`; [how claims are judged, how to run it again](reproduction.md)."
#: Fewer seeds than these are said.
SEEDS = 3
_CAPTIONS = {
    "table2": "Best accuracy, ours next to the paper's",
    "curves": "Accuracy, and loss as means over five rounds; the band is from the lowest to the highest seed",
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
    """Return the main page of ``studies``; ``images`` is the address of the folder that holds a folder for each."""
    contents = [f"| [{study.title}]({name}) | {_contents(study)} |" for study, name in _names(studies)]
    return Template((files("feddpc.paper") / "reproduction.md").read_text(encoding="utf-8")).substitute(
        contents="\n".join([*contents, f"| [Costs]({COSTS}) | Table 1: operations, states and messages, counted |"]),
        summary=_summary(studies),
        cells=f"{tables.cells(studies).markdown()}\n\n{_accuracies(studies, images)}".strip(),
        missing="\n".join(line for study in studies for line in _state(study)),
        rates=", ".join(f"{v:g}" for v in published.RATES),
        values=", ".join(f"{v:g}" for v in published.VALUES),
    )


def pages(studies: Sequence[PaperStudy], images: str) -> dict[str, str]:
    """Return the pages below the main page by the names of their files: one per study, and the costs."""
    local, server = table1.tables("cifar10", "paper")
    written = {COSTS: f"# Costs of the methods\n\n{_BACK}\n\n{local.markdown()}\n\n{server.markdown()}\n"}
    for study, name in _names(studies):
        parts = [part for part in PARTS if study.part(part)]
        pictures = {name: f"{images}/{_folder(study)}/{name}.png" for name in figures.available(study, parts)}
        title, _, rest = section(study, parts, pictures).partition("\n\n")
        blocks = [title.removeprefix("#"), _BACK, "\n".join(_orders(study)), rest]
        written[name] = "\n\n".join(filter(None, blocks)) + "\n"
    return written


def _names(studies: Sequence[PaperStudy]) -> list[tuple[PaperStudy, str]]:
    """Return the studies with the names of their pages; the first of a data set has the data set's name."""
    seen: Counter[str] = Counter()
    named = []
    for study in studies:
        more = f"-{study.scale}" if seen[study.data] else ""
        named.append((study, f"reproduction-{study.data}{more}.md"))
        seen[study.data] += 1
    return named


def _contents(study: PaperStudy) -> str:
    titles = {
        "grid": "tuning",
        "table2": "Table 2 and figure of its curves",
        "figure4": "ablation",
        "figure5": "lambda",
    }
    return ", ".join(title for part, title in titles.items() if study.part(part))


def _accuracies(studies: Sequence[PaperStudy], images: str) -> str:
    """Return the figure of all accuracies of every study that has Table 2."""
    return "\n\n".join(
        f"![{_CAPTIONS['table2']}, {study.title}]({images}/{_folder(study)}/table2.png)"
        for study in studies
        if "table2" in figures.available(study, [part for part in PARTS if study.part(part)])
    )


def _state(study: PaperStudy) -> list[str]:
    """Return what FedDPC is above and below in a study, and what is missing there, as a list."""
    rows, lines = study.part("table2"), [f"* **{study.title}**"]
    lines += [f"  * {line}." for line in summary(study, PARTS)]
    counts = sorted({len(row.scores) for row in rows})
    missing = [f"shortened: {study.short}"] if study.short else []
    if counts and counts[0] < SEEDS:
        missing.append(
            f"{counts[0]} to {counts[-1]} seeds"
            if counts[0] < counts[-1]
            else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
        )
    if absent := [label(name) for name in ROWS if name not in {row.name for row in rows}]:
        missing.append(f"not run: {' / '.join(absent)}")
    if any(row.config.model == "resnet18" and row.config.model_options.get("init") != "torch" for row in rows):
        missing.append("its convolutions started as torchvision's, not as torch's")
    lengths = {row.config.rounds for row in study.part("grid")}
    if len(lengths) == 1:
        missing.append(f"tuned on a plain grid of {lengths.pop()} rounds, before there was a ladder")
    return lines + ([f"  * Missing or different from the plan: {'; '.join(missing)}."] if missing else [])


def write(studies: Sequence[PaperStudy], path: Path, images: Path) -> list[Path]:
    """Write the pages of ``studies`` beside ``path``, the main page, and figures below ``images``; return all paths."""
    pictures: list[Path] = []
    for study in studies:
        make_folder(images / _folder(study))
        pictures += figures.draw_all(study, images / _folder(study), PARTS)
    for picture in pictures:
        _reduce_colors(picture)
    make_folder(path.parent)
    address = Path(os.path.relpath(images, path.parent)).as_posix()
    replace_text(path, render(studies, address))
    below = {path.parent / name: text for name, text in pages(studies, address).items()}
    for page, text in below.items():
        replace_text(page, text)
    return [path, *below, *pictures]


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
    return "\n".join([*lines, "", *_together(studies)]).rstrip()


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
        f"* Time: {runs} runs on {', '.join(titles)} took {ours}, tuning and controls included (device: "
        f"{', '.join(devices)}); the rounds of the paper's {cells} cells take {reported} at its seconds per round on a "
        "Tesla V100, without its grid of settings."
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
            lines[-1] += " The tuning behind it had hardly begun to learn: this order says little."
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
