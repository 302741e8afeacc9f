"""The numbers of a page: everything that its charts draw and its downloads give, once, as JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from feddpc.report import figures, tables
from feddpc.report.groups import groups, status
from feddpc.runs.record import FIELDS
from feddpc.runs.stored import StoredRun
from feddpc.tasks.metrics import PARTS

#: Values of all rounds together, clients named in all rounds, cells of all client-by-class tables: about 15 MB of page.
MOST_VALUES, MOST_PARTICIPANTS, MOST_CELLS = 800_000, 800_000, 400_000
#: What a record says about clients of a round.
CLIENTS = ("participants", "dropped", "rejected")
#: The angle of FedDPC's mean cosine, in degrees; it stands among the notes.
ANGLE = "angle"

Column = list[float | None]
Json = dict[str, Any]


def numbers(runs: Sequence[StoredRun]) -> Json:
    """Return what the page shows of ``runs``: numbers have six digits, and what is not a finite number is None.

    Tables that several runs share (who took part, who holds what) stand once, and the runs hold their place in the
    list. Where all of it would make a page too large for a browser, ``left_out`` says in words what is missing.
    """
    every = groups(runs)
    ordered = [run for group in every for run in group.runs]
    left_out: list[str] = []
    stride = math.ceil(sum(len(r.records) * (6 + len(note_names([r]))) for r in ordered) / MOST_VALUES) or 1
    if stride > 1:
        left_out.append(f"Of the rounds, the page holds the first, the last and every {stride}th between them.")
    schedules = _Shelf(MOST_PARTICIPANTS)
    holdings = _Shelf(MOST_CELLS)
    shown = []
    for index, group in enumerate(every):
        for run in group.runs:
            kept = _kept(run, stride)
            curves, notes = _columns(run)
            shown.append(
                {"name": run.folder.name, "group": index, "seed": run.config.seed, "status": status(run)}
                | {"rounds": _picked(curves, kept), "notes": _picked(notes, kept)}
                | {"schedule": schedules.place(_schedule(run)), "holdings": holdings.place(_holdings(run))}
                | {"clients": client_metrics(run)}
                | {"config": _jsonable(run.config.asdict()), "environment": _jsonable(environment(run))}
                | {"summary": _jsonable(run.summary)}
            )
    for shelf, what in ((schedules, "who took part"), (holdings, "who holds what")):
        if shelf.refused:
            count = f"{shelf.refused} run{'s' * (shelf.refused > 1)}"
            left_out.append(f"For {count} the page does not hold {what}.")
    table = tables.rows(runs)
    return {
        "groups": [
            {"label": group.label, "colour": colour, "dark": figures.DARK[colour], "dash": figures.DASHES[dash]}
            | {"rank": _short(None if row.last10 is None else row.metric.sign * row.last10)}  # larger is better
            for group, row, (colour, dash) in zip(every, table, figures.styles(every), strict=True)
        ],
        "table": _jsonable(tables.as_dicts(table)),
        "runs": shown,
        "schedules": schedules.things,
        "holdings": holdings.things,
        "left_out": left_out,
    }


def note_names(runs: Iterable[StoredRun]) -> list[str]:
    """Return the names of the numbers that the methods wrote into their records, beside what every record has."""
    names: dict[str, None] = {}
    for run in runs:
        common = {*FIELDS, *(metric.key(part) for metric in run.metrics for part in PARTS)}
        numbers = (k for r in run.records for k, v in r.items() if k not in common and isinstance(v, int | float))
        names |= dict.fromkeys(numbers)
    return list(names)


def client_metrics(run: StoredRun) -> dict[str, Column]:
    """Return the metrics at each client, if the folder tells them, in the shape they must have."""
    metrics = run.clients.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {str(name): [_short(v) for v in values] for name, values in metrics.items() if isinstance(values, list)}


def environment(run: StoredRun) -> Json:
    """Return what is known of the machine; of the command, not where the program lies."""
    known = dict(run.environment)
    known.pop("fingerprint", None)  # for resuming, not for reading
    command = known.get("command")
    if isinstance(command, list) and command:
        known["command"] = shlex.join([Path(str(command[0])).name, *map(str, command[1:])])
    return known


def embedded(value: Any) -> str:
    r"""Return JSON that can stand inside a script element: nothing in it can end the element or begin a comment.

    >>> embedded({"name": "</script>\u2028"})
    '{"name":"\\u003c/script>\\u2028"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


class _Shelf:
    """Different things, each kept once; one that no longer fits is refused and counted."""

    def __init__(self, room: int) -> None:
        self.room, self.refused = room, 0
        self.things: list[Json] = []
        self._places: dict[str, int | None] = {}

    def place(self, thing: tuple[Json, int] | None) -> int | None:
        """Return the place of a thing, given with its size; None if there is nothing, or no room."""
        if thing is None:
            return None
        value, size = thing
        key = json.dumps(value)
        if key not in self._places:
            self._places[key] = len(self.things) if size <= self.room else None
            if size <= self.room:
                self.room -= size
                self.things.append(value)
        self.refused += self._places[key] is None
        return self._places[key]


def _kept(run: StoredRun, stride: int) -> list[int]:
    """Return which records the page holds, about one of ``stride``: rounds that were evaluated come before others."""
    count = len(run.records)
    if stride == 1 or not count:
        return list(range(count))
    keys = [metric.key() for metric in run.metrics]
    evaluated = [i for i, record in enumerate(run.records) if any(record.get(key) is not None for key in keys)]
    chosen = evaluated or list(range(count))
    step = math.ceil(stride * len(chosen) / count)
    return sorted({0, count - 1, *chosen[step - 1 :: step]})


def _columns(run: StoredRun) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return what every record has, with the seconds and the numbers sent up to each round, and the method's notes."""
    records = run.records
    curves: dict[str, Column] = {"round": [record.get("round") for record in records]}
    tested, held_out = ([metric.key(part) for metric in run.metrics] for part in PARTS)
    held_out = [key for key in held_out if any(key in record for record in records)]
    keys = (*tested, "train_loss", "seconds", *held_out)
    curves |= {key: [_short(record.get(key)) for record in records] for key in keys}
    seconds = (figures.number(record.get("seconds")) for record in records)
    curves["elapsed"] = [_short(total) for total in accumulate(0.0 if math.isnan(s) else s for s in seconds)]
    if (each := _sent(run)) is not None:
        once, a_client = each
        answered = (sum(len(client_ids(record, key)) for key in ("participants", "rejected")) for record in records)
        curves["sent"] = [_short(once + a_client * total) for total in accumulate(answered)]
    notes = {key: [_short(record.get(key)) for record in records] for key in note_names([run])}
    if "mean_cosine" in notes and ANGLE not in notes:
        notes[ANGLE] = [_angle(c) for c in notes["mean_cosine"]]
    return curves, notes


def _angle(cosine: float | None) -> float | None:
    """Return the angle in degrees.

    >>> _angle(0), _angle(1.0000001)
    (90, 0)
    """
    return None if cosine is None else _short(math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))


def _sent(run: StoredRun) -> tuple[float, float] | None:
    """Return what all clients exchange before round 1, and a participant in a round, in multiples of the model."""
    costs = (run.summary or {}).get("costs")
    if not isinstance(costs, dict):
        return None
    down, up, down_once, up_once = (figures.number(costs.get(k)) for k in ("down", "up", "down_once", "up_once"))
    each = (run.config.clients * (down_once + up_once), down + up)
    return each if all(map(math.isfinite, each)) else None


def _schedule(run: StoredRun) -> tuple[Json, int] | None:
    table = {key: [client_ids(record, key) for record in run.records] for key in CLIENTS}
    size = sum(len(ids) for rows in table.values() for ids in rows)
    clients = max([run.config.clients, *(1 + max(ids) for rows in table.values() for ids in rows if ids)])
    return ({"clients": clients} | {k: rows for k, rows in table.items() if any(rows)}, size) if size else None


def client_ids(record: Mapping[str, Any], key: str) -> list[int]:
    """Return a list of a record, such as who took part; of anything else, nothing."""
    ids = record.get(key)
    return [i for i in ids if type(i) is int and i >= 0] if isinstance(ids, list) else []


def _holdings(run: StoredRun) -> tuple[Json, int] | None:
    """Return who holds what if the folder tells it, in the shape it must have."""
    names, counts = run.holdings.get("classes"), run.holdings.get("counts")
    if not (isinstance(names, list) and isinstance(counts, list) and names and counts):
        return None
    if not all(isinstance(row, list) and len(row) == len(names) and all(type(n) is int for n in row) for row in counts):
        return None
    return {"classes": [str(name) for name in names], "counts": counts}, len(names) * len(counts)


def _picked(columns: Mapping[str, Column], kept: Sequence[int]) -> dict[str, Column]:
    return {key: [column[i] for i in kept] for key, column in columns.items()}


def _short(value: Any) -> float | None:
    """Return a number with six digits, as a whole number where it is one.

    >>> _short(0.123456789), _short(2.0), _short(None), _short(float("nan"))
    (0.123457, 2, None, None)
    """
    known = figures.number(value)
    if math.isnan(known):
        return None
    short = float(f"{known:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _jsonable(value: Any) -> Any:
    """Replace numbers that JSON cannot write, which a configuration may hold, by their names."""
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
