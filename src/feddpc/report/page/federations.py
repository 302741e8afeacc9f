"""What a page says about federations: which node each client is, and when the rounds took place."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from feddpc.report import figures
from feddpc.report.groups import show
from feddpc.report.page.embed import CLIENTS, client_ids
from feddpc.report.page.html import boxed, folded, heads, line
from feddpc.runs.stored import StoredRun

#: Rows of the table of nodes.
MOST_NODES = 2000


def node_table(runs: Sequence[StoredRun]) -> str:
    """Return a folded table with the nodes of every client and what became of its rounds; nothing for simulations."""
    rows = [(run, row) for run in runs for row in _clients(run)]
    several = len({run.folder for run, _ in rows}) > 1
    lines = [line([*([show(run.folder.name)] if several else []), *row]) for run, row in rows[:MOST_NODES]]
    if not lines:
        return ""
    names = [*(["run"] if several else []), "client", "node", "took part", "dropped out", "rejected", "in quarantine"]
    more = f"<p>{len(rows) - MOST_NODES} more in the run folders.</p>" if len(rows) > MOST_NODES else ""
    return folded("Nodes of the clients, and their rounds", boxed(heads(names), lines, "plain", "Nodes") + more)


def _clients(run: StoredRun) -> list[list[str]]:
    """Return client, nodes, and rounds by what became of them, of a run whose records name nodes."""
    nodes: dict[int, dict[int, None]] = {}
    rounds = {kind: Counter[int]() for kind in CLIENTS}
    quarantined = Counter[int]()
    for record in run.records:
        for client, node in _nodes(record).items():
            nodes.setdefault(client, {})[node] = None
        for kind in CLIENTS:
            rounds[kind].update(client_ids(record, kind))
        quarantined.update(client_ids(record, "quarantined"))
    rows = []
    for client, own in sorted(nodes.items()):
        counts = [*(rounds[kind][client] for kind in CLIENTS), sum(quarantined[node] for node in own)]
        rows.append([str(client), ", ".join(map(str, own)), *map(str, counts)])
    return rows


def _nodes(record: Mapping[str, Any]) -> dict[int, int]:
    table = record.get("nodes")
    known = table.items() if isinstance(table, dict) else ()
    return {int(c): node for c, node in known if str(c).isdecimal() and len(c) < 20 and type(node) is int}


def began_and_ended(run: StoredRun) -> tuple[str, str]:
    """Return when the first round began and the last one ended; empty texts for runs that do not say so."""
    times = [(time, record) for record in run.records if (time := _time(record)) is not None]
    if not times:
        return "", ""
    (first, _), (last, record) = times[0], times[-1]
    seconds = figures.number(record.get("seconds"))
    try:
        last += dt.timedelta(seconds=0.0 if math.isnan(seconds) else seconds)
    except OverflowError:
        return f"{first:%Y-%m-%d %H:%M:%S} UTC", ""
    return f"{first:%Y-%m-%d %H:%M:%S} UTC", f"{last:%Y-%m-%d %H:%M:%S} UTC"


def _time(record: Mapping[str, Any]) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(str(record.get("time"))).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None
