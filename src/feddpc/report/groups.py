"""Which runs are the same thing with another seed, and what each such group is called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddpc.config import EXECUTION_KEYS, OPTION_TABLES, keys
from feddpc.methods import METHODS
from feddpc.registry import short_name
from feddpc.runs.stored import StoredRun
from feddpc.tasks.metrics import Metric


@dataclass(frozen=True)
class SeedGroup:
    """One configuration, run with one or more seeds; ``label`` is the method and what sets it apart from the others."""

    label: str
    runs: list[StoredRun]

    @property
    def method(self) -> str:
        """Name of the method."""
        return short_name(self.runs[0].config.method)

    @property
    def metric(self) -> Metric:
        """What the runs are compared by."""
        return self.runs[0].primary

    @property
    def hyper(self) -> dict[str, Any]:
        """The method's hyper-parameters."""
        return self.runs[0].config.hyper


def groups(runs: Sequence[StoredRun]) -> list[SeedGroup]:
    """Group the runs that differ only in the seed, in the order in which they first appear.

    Keys that change only where and how fast a run computes separate runs only where one seed would be counted twice.
    """
    aside: tuple[str, ...] = ("seed", *EXECUTION_KEYS)
    parts = _parts(runs, aside)
    if any(len({run.config.seed for run in part}) < len(part) for part in parts):
        aside = ("seed",)
        parts = _parts(runs, aside)
    return [SeedGroup(label, part) for label, part in zip(_labels([p[0] for p in parts], aside), parts, strict=True)]


def settings(run: StoredRun, aside: Iterable[str] = ("seed",)) -> dict[str, Any]:
    """Return the configuration without method and hyper-parameters, options spelled as the command line spells them."""
    left_out = {"method", "hyper", *OPTION_TABLES.values(), *aside}
    values = run.config.asdict()
    plain = {k: short_name(v) if keys()[k].kind else v for k, v in values.items() if k not in left_out}
    return plain | {f"{part}.{k}": v for part, name in OPTION_TABLES.items() for k, v in values[name].items()}


def primaries(every: Iterable[SeedGroup]) -> list[Metric]:
    """Return the metrics that the groups are compared by: one, unless they have different tasks."""
    return list(dict.fromkeys(group.metric for group in every))


def status(run: StoredRun) -> str:
    """Say how a run ended: finished, diverged, interrupted, stopped; or unfinished, if it runs still or was killed."""
    summary = run.summary or {}
    ended = str(summary.get("status", "unfinished"))
    # A run that was resumed keeps its old summary until it ends again.
    stale = summary.get("rounds") != len(run.records)
    return "unfinished" if stale or (ended == "finished" and len(run.records) < run.config.rounds) else ended


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all tables; a missing value is a difference.

    >>> differing([{"lr": 0.1, "lam": 1.0}, {"lr": 0.1, "lam": 0.0, "tau": 0.5}])
    ['lam', 'tau']
    """
    names = dict.fromkeys(name for table in tables for name in table)
    return [n for n in names if len({show(t[n]) if n in t else None for t in tables}) > 1]


def show(value: Any) -> str:
    r"""Return a value as short text for people; what cannot be printed is replaced.

    >>> show(1.0), show(1e-6), show(0.1 + 0.2), show(False), show([1, 2.0]), show("a\x1bb")
    ('1', '1e-06', '0.30000000000000004', 'false', '[1, 2]', 'a�b')
    """
    if value == "":
        return "none"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value or value != value else repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _parts(runs: Sequence[StoredRun], aside: Sequence[str]) -> list[list[StoredRun]]:
    parts: dict[object, list[StoredRun]] = {}
    for run in runs:
        tables = (run.config.hyper, settings(run, aside))
        key = (run.config.method, *(tuple(sorted((k, show(v)) for k, v in table.items())) for table in tables))
        parts.setdefault(key, []).append(run)
    return list(parts.values())


def _usual_buffers(run: StoredRun) -> str:
    """Return what happens to statistics of a network with this method, unless something else is asked for."""
    return "local" if getattr(METHODS.entries.get(run.config.method), "keeps_statistics", False) else "average"


def _told_once(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only repeats another value: FedCM has an alpha of its own, with another meaning.

    >>> _told_once({"alpha": 0.2, "lr": 0.1, "server_lr": 0.1, "partition.alpha": 0.2})
    {'lr': 0.1, 'partition.alpha': 0.2}
    """
    same = {"alpha": "partition.alpha", "server_lr": "lr"}
    return {k: v for k, v in table.items() if k not in same or table.get(same[k]) != v}


def _labels(runs: Sequence[StoredRun], aside: Sequence[str]) -> list[str]:
    usual = [{"buffers"} if run.config.buffers == _usual_buffers(run) else set() for run in runs]
    others = [_told_once(settings(run, {*aside, *more})) for run, more in zip(runs, usual, strict=True)]
    apart = differing(others)
    labels = []
    for run, other in zip(runs, others, strict=True):
        hyper = run.config.hyper
        own = differing([r.config.hyper for r in runs if r.config.method == run.config.method])
        words = [f"{k}={show(table[k])}" for table, keys in ((hyper, own), (other, apart)) for k in keys if k in table]
        labels.append(show(" ".join([short_name(run.config.method), *words])))
    return labels
