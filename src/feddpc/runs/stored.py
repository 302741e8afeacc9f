"""Reading a run folder, finished or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.runs.record import ROUNDS, load_config, read_json, read_records, without_former_last
from feddpc.runs.summary import summarize
from feddpc.tasks.metrics import CLASSIFICATION, LOSS, Metric


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder tells it."""

    folder: Path
    config: Config
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    environment: dict[str, Any]
    privacy: dict[str, Any] = field(default_factory=dict)  #: what left the clients beside their updates
    holdings: dict[str, Any] = field(default_factory=dict)  #: samples by client and class, and the classes' names
    metrics: tuple[Metric, ...] = CLASSIFICATION  #: what was measured, the primary one first
    clients: dict[str, Any] = field(default_factory=dict)  #: metrics at each client after the last evaluated round

    @property
    def primary(self) -> Metric:
        """The metric that runs are compared by."""
        return self.metrics[0]

    def summarize(self, status: str) -> dict[str, Any]:
        """Return the summary of the records, which are the evidence, whatever ``summary.json`` says."""
        return summarize(self.config, self.records, status, None, self.metrics)


def load(path: Path, damage: list[str] | None = None) -> StoredRun:
    """Read a run folder, finished or not.

    With ``damage`` what cannot be read is said there and left out; only the configuration must be whole.
    """
    config = load_config(path)
    records = without_former_last(config, read_records(path / ROUNDS, damage=damage))
    names = ("summary", "environment", "privacy", "holdings", "clients")
    summary, about, privacy, holdings, clients = (read_json(path / f"{name}.json", damage) for name in names)
    metrics = read_metrics(about.pop("metrics", None), summary)
    return StoredRun(path, config, records, summary or None, about, privacy, holdings, metrics, clients)


def read_metrics(tables: Any, summary: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics of a run, as its environment or else its summary describes them.

    Runs that do not say what they measured are classifications.
    """
    primary = summary.get("primary")
    for some in (tables, [primary, LOSS.as_dict()]):
        try:
            return tuple({metric.name: metric for metric in map(Metric.read, some)}.values()) or CLASSIFICATION
        except (BadInputError, TypeError):
            continue
    return CLASSIFICATION
