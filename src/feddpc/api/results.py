"""What the functions of the Python interface return."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from feddpc.config import Config
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError, unknown
from feddpc.models.flat import with_weights
from feddpc.registry import short_name
from feddpc.report import figures, page, tables
from feddpc.runs.environment import environment
from feddpc.runs.provenance import holdings
from feddpc.runs.rerun import RerunReport
from feddpc.runs.runner import Outcome
from feddpc.runs.stored import StoredRun, load
from feddpc.tasks.metrics import ACCURACY, Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Result:
    """What a simulation gave: curves, summary and the model that the run keeps."""

    config: Config  #: complete: says exactly what was computed
    status: str  #: finished, diverged, interrupted (by Ctrl-C) or stopped (by a callback)
    records: list[dict[str, Any]]  #: one per round, as in rounds.jsonl
    summary: dict[str, Any]
    state_dict: dict[str, Tensor]  #: of the last or best round (``keep``); ``module.load_state_dict`` accepts it
    folder: Path | None
    partition: Partition  #: who holds which training samples
    clients: dict[str, list[float]]  #: metrics at each client (``evaluate_clients``), of the last evaluation
    stored: StoredRun = field(compare=False)  #: what reports read of a run
    module: nn.Module = field(compare=False)  #: the network that was trained; its weights are not the result

    #: What other runs of its comparison record: curves that are NaN here
    elsewhere: frozenset[str] = field(default=frozenset(), compare=False, kw_only=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        config, metric = self.config, self.primary
        best = self.summary[f"best_{metric.name}"]
        facts = [
            f"{short_name(config.method)} on {short_name(config.data)}, "
            f"{len(self.records)} of {config.rounds} rounds, {self.status}",
            f"no test {metric.words}" if best is None else f"best test {metric.words} {metric.with_unit(best)}",
        ]
        return facts if self.folder is None else [*facts, str(self.folder)]

    def curve(self, name: str) -> Floats:
        """Return one value per round, NaN where there is none: ``test_accuracy``, ``train_loss``, a method's note."""
        if self.records and name not in self.recorded | self.elsewhere:
            raise unknown("curve", name, self.recorded | self.elsewhere)
        return np.array([np.nan if r.get(name) is None else r[name] for r in self.records], dtype=np.float64)

    @property
    def recorded(self) -> frozenset[str]:
        """The names of all numbers that rounds of this run record."""
        rounds = (record.items() for record in self.records)
        return frozenset(key for items in rounds for key, value in items if isinstance(value, int | float | None))

    def frame(self, columns: Sequence[str] | None = None) -> DataFrame:
        """Return a pandas DataFrame with one row per round, and a column for all that is recorded.

        ``columns`` chooses some of them; ``method``, ``seed`` and ``round`` are always there.
        """
        return _frame([(short_name(self.config.method), self.config.seed, self.records)], columns)

    @cached_property
    def model(self) -> nn.Module:
        """The network with the weights of ``state_dict``, on the CPU and in evaluation mode.

        It takes samples as in training: scaled by ``config.scaling``, images as [samples, channels, height, width].
        """
        return with_weights(self.module, self.state_dict)

    @property
    def reason(self) -> str | None:
        """Why the run ended before its last round; None if it did not."""
        reason: str | None = self.summary["reason"]
        return reason

    @property
    def primary(self) -> Metric:
        """The metric that runs of this task are compared by."""
        return Metric.read(self.summary["primary"])

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics of the last round that was evaluated: ``test_accuracy``, ``test_loss``."""
        return dict(self.summary["metrics"])

    @property
    def test_accuracy(self) -> Floats:
        """Test accuracy after every round, from 0 to 1; refused where no accuracy is measured."""
        if ACCURACY.name not in {metric.name for metric in self.stored.metrics}:
            key = self.primary.key()
            raise BadInputError(f"test_accuracy: this run measures no accuracy: use curve({key!r}), its primary metric")
        return self.curve("test_accuracy")

    @property
    def test_loss(self) -> Floats:
        """Mean test loss after every round."""
        return self.curve("test_loss")

    @property
    def train_loss(self) -> Floats:
        """Mean loss of the participants during local training, every round."""
        return self.curve("train_loss")

    @property
    def best_accuracy(self) -> float:
        """The largest test accuracy over rounds; NaN where no round has one."""
        best = self.summary.get("best_accuracy")
        return float("nan" if best is None else best)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the primary metric and the training loss over rounds; save the picture if ``path`` is given."""
        return _plot([self.stored], path)


@dataclass(frozen=True, repr=False)
class Rerun(Result):
    """What a run gave that was made again, and how it compares with the first one."""

    likeness: RerunReport

    def _facts(self) -> list[str]:
        return [*super()._facts(), str(self.likeness)]


@dataclass(frozen=True, repr=False)
class Comparison:
    """What a comparison gave: one result per method and seed, and what can be made of all of them.

    After an interrupt it holds the runs that were begun.
    """

    results: dict[tuple[str, int], Result]  #: by method and seed, in the order in which they ran
    planned: int  #: how many runs there are when all have ended
    folder: Path | None

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(method for method, _ in self.results))
        data = ", ".join(dict.fromkeys(short_name(result.config.data) for result in self.results.values()))
        facts = [f"{names} on {data}"] if self.results else []
        facts.append(f"{len(self.results)} of {self.planned} runs")
        other = [result.status for result in self.results.values() if result.status != "finished"]
        facts += [f"{other.count(status)} {status}" for status in dict.fromkeys(other)]
        facts += [
            f"best test {row.metric.words}: {row.label} {row.metric.text(row.best, row.best_spread)}"
            for row in self._rows()
            if row.leads
        ]
        return f"<Comparison: {'; '.join(facts + ([str(self.folder)] if self.folder else []))}>"

    def frame(self, columns: Sequence[str] | None = None) -> DataFrame:
        """Return a pandas DataFrame with one row per method, seed and round, and a column for all that is recorded.

        ``columns`` chooses some of them; ``method``, ``seed`` and ``round`` are always there.
        """
        return _frame(((*key, result.records) for key, result in self.results.items()), columns)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the primary metric and the training loss per round: the mean over seeds, in a band of all seeds.

        The picture is saved if ``path`` is given.
        """
        return _plot(self._runs(), path)

    def report(self, path: str | Path) -> Path:
        """Write the HTML page of ``feddpc report`` to ``path``, a file or a folder, and return the file."""
        target = Path(path)
        return page.write_page(target / "report.html" if target.is_dir() else target, self._runs())

    def table(self) -> str:
        """Return the table of ``feddpc compare`` as text: one row per method, mean and spread over seeds."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(tables.make_table(self._rows()).rich())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        return tables.make_table(self._rows()).html()

    def _runs(self) -> list[StoredRun]:
        return [result.stored for result in self.results.values()]

    def _rows(self) -> list[tables.ResultRow]:
        return tables.rows(self._runs())


def result_of(outcome: Outcome) -> Result:
    """Return what the Python interface gives of a run that ended; the data are let go."""
    experiment = outcome.experiment
    return Result(
        config=outcome.config,
        status=outcome.status,
        records=outcome.records,
        summary=outcome.summary,
        state_dict=experiment.task.flat.state_dict(outcome.w),
        folder=outcome.folder,
        partition=experiment.partition,
        clients=outcome.clients,
        stored=_stored(outcome),
        module=experiment.task.module,
    )


def _stored(outcome: Outcome) -> StoredRun:
    """Return what reports read of a run: what its folder says, or would say if it had one."""
    if outcome.folder is not None:
        return load(outcome.folder, damage=[])
    experiment, config = outcome.experiment, outcome.config
    about = environment(config.engine, config.device)
    del about["metrics"]
    return StoredRun(
        Path(f"{short_name(config.method)}-seed{config.seed}"),
        config,
        outcome.records,
        outcome.summary,
        about,
        holdings=holdings(experiment),
        metrics=tuple(experiment.task.metrics),
    )


def _plot(runs: Sequence[StoredRun], path: str | Path | None) -> Figure:
    figure = figures.curves(runs)
    if path is not None:
        figures.save(figure, Path(path))
    return figure


def _frame(runs: Iterable[tuple[str, int, Sequence[Mapping[str, Any]]]], columns: Sequence[str] | None) -> DataFrame:
    """Return the records of runs, each with its method and seed, as one table."""
    try:
        import pandas as pd
    except ImportError:
        raise BadInputError("a frame needs pandas: pip install 'pandas>=2.1'") from None
    if isinstance(columns, str):
        raise BadInputError(f"columns = {columns!r}: give a list of names, [{columns!r}]")
    rows = [{"method": method, "seed": seed, **record} for method, seed, records in runs for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["method", "seed", "round"]
    for name in columns or ():
        if name not in names:
            raise unknown("column", name, names)
    chosen = names if columns is None else dict.fromkeys(["method", "seed", "round", *columns])
    table = {name: [row.get(name) for row in rows] for name in chosen}
    empty = [name for name, values in table.items() if rows and all(value is None for value in values)]
    return pd.DataFrame(table).astype(dict.fromkeys(empty, float))
