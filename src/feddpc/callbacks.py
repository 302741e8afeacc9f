"""Callbacks: code of your own that follows a run round by round, and may stop it.

>>> class Print(Callback):
...     def on_round_end(self, run):
...         print(run.round, sorted(run.record)[:2])
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.errors import BadInputError, unknown
from feddpc.experiment import Experiment
from feddpc.models.flat import with_weights
from feddpc.tasks.metrics import LOSS, METRICS, Metric

if TYPE_CHECKING:
    from torch import nn

    from feddpc.methods.base import Method
    from feddpc.round.state import RunState


class Run:
    """A run while it is going, as callbacks see it."""

    def __init__(
        self,
        config: Config,
        experiment: Experiment,
        method: Method,
        state: RunState,
        records: list[dict[str, Any]],
        folder: Path | None = None,
    ) -> None:
        self.config = config  #: complete: says exactly what is computed
        self.records = records  #: one per round so far, those before a resume included
        self.folder = folder  #: where it is recorded; None if nowhere
        self.status = "running"  #: in ``on_run_end``: finished, diverged, interrupted or stopped
        self.metrics: tuple[Metric, ...] = tuple(experiment.task.metrics)  #: what is measured, the primary one first
        self._experiment, self._method, self._state = experiment, method, state
        self._stopped_by: tuple[str, str] | None = None
        self._caller = ""

    def __repr__(self) -> str:
        return f"<Run: {self.config.method}, seed {self.config.seed}, round {self.round} of {self.config.rounds}>"

    @property
    def round(self) -> int:
        """The last finished round; 0 before the first."""
        return len(self.records)

    @property
    def record(self) -> dict[str, Any]:
        """A copy of what ``rounds.jsonl`` says about that round; empty before the first."""
        return copy.deepcopy(self.records[-1]) if self.records else {}

    @property
    def model(self) -> nn.Module:
        """A new module with the current global weights, on the CPU and in evaluation mode; keep it or change it."""
        task = self._experiment.task
        return with_weights(task.module, task.flat.state_dict(self._state.model(self._method)))

    @property
    def validates(self) -> bool:
        """Whether there are validation data."""
        return self._experiment.validate is not None

    def stop(self, reason: str = "") -> None:
        """End the run after the current round, which counts; before round 1, after that one. It can be resumed."""
        self._stopped_by = self._stopped_by or (self._caller, str(reason))

    @property
    def stopped(self) -> tuple[str, str] | None:
        """The status of a run that a callback has stopped, and why; None if none has."""
        if self._stopped_by is None:
            return None
        name, reason = self._stopped_by
        by = f"by {name} " if name else ""
        return "stopped", f"stopped {by}after round {self.round} of {self.config.rounds}" + (
            f": {reason}" if reason else ""
        )


class Callback:
    """Base class of callbacks for :func:`feddpc.simulate`, ``rerun`` and ``compare``: override what you need.

    An error ends the run and is raised with a note that names the callback. The rounds so far are kept, and the run
    can be resumed. In a comparison, the same callback follows one run after the other.
    """

    def on_run_begin(self, run: Run) -> None:
        """Before the first round; a resumed run has its earlier rounds in ``run.records``."""

    def on_round_end(self, run: Run) -> None:
        """After every round, before it is written down; ``run.stop()`` makes it the last one."""

    def on_run_end(self, run: Run) -> None:
        """After the last round, when records, summary and model are written."""


class EarlyStopping(Callback):
    """Stop a run when its metric has not improved for ``patience`` evaluated rounds in a row.

    The metric is the task's primary one, on validation data where there are any, else on the test set; its direction
    says what an improvement is. Another one can be named, as it stands in the records.

    >>> EarlyStopping(patience=5)
    EarlyStopping(patience=5)
    """

    def __init__(self, patience: int, metric: str | None = None) -> None:
        self.patience, self.metric = check_int("patience", patience, 1), metric
        self.best: float | None = None  #: the best value of the present run
        self.best_round = 0
        self.waited = 0  #: evaluated rounds since then

    def __repr__(self) -> str:
        named = "" if self.metric is None else f", metric={self.metric!r}"
        return f"{type(self).__name__}(patience={self.patience}{named})"

    def on_run_begin(self, run: Run) -> None:
        """Forget the run before; a resumed run continues with what its records say."""
        self.best, self.best_round, self.waited = None, 0, 0
        for record in run.records:
            self._see(record, *self._measure(run, record))

    def on_round_end(self, run: Run) -> None:
        """Compare the round with the best one."""
        key, sign = self._measure(run, run.records[-1])
        self._see(run.records[-1], key, sign)
        if self.waited >= self.patience:
            run.stop(f"{key} has not improved on {self.best:g} of round {self.best_round}")

    def _see(self, record: dict[str, Any], key: str, sign: int) -> None:
        value = record[key]
        if value is None:
            return
        if self.best is None or sign * value > sign * self.best:
            self.best, self.best_round, self.waited = value, record["round"], 0
        else:
            self.waited += 1

    def _measure(self, run: Run, record: dict[str, Any]) -> tuple[str, int]:
        """Return the name of the metric in the records, and the sign that makes larger better."""
        primary = run.metrics[0]
        if self.metric is None:
            return primary.key("validation" if run.validates else "test"), primary.sign
        known = METRICS | {metric.name: metric for metric in run.metrics}
        listed = {metric.key(part): metric for metric in known.values() for part in ("test", "validation")}
        listed = {key: metric for key, metric in listed.items() if key in record} | {"train_loss": LOSS}
        if self.metric not in listed:
            raise unknown("metric of EarlyStopping", self.metric, listed)
        return self.metric, listed[self.metric].sign


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self.callbacks, self.run = callbacks, run

    def call(self, hook: str) -> None:
        """Call ``hook`` of each callback in turn; an error gets a note that says which one raised it."""
        for callback in self.callbacks:
            self.run._caller = type(callback).__name__
            try:
                getattr(callback, hook)(self.run)
            except Exception as error:
                error.add_note(f"raised by the callback {self.run._caller}.{hook}, after round {self.run.round}")
                raise


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks as a list, or say what one of them is instead."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise BadInputError(f"callbacks is of type {type(callbacks).__name__}: give a list of feddpc.Callback objects")
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise BadInputError(f"callbacks holds the class {callback.__name__}: give an object, {callback.__name__}()")
        if not isinstance(callback, Callback):
            raise BadInputError(
                f"callbacks holds {callback!r} of type {type(callback).__name__}: give objects of subclasses of "
                "feddpc.Callback"
            )
        _check_hooks(callback)
    return list(callbacks)


def _check_hooks(callback: Callback) -> None:
    """Raise if a callback has a function that looks like a hook but is none, or a hook that cannot take the run."""
    kind = type(callback).__name__
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for name in (name for name in dir(callback) if name.startswith("on_")):
        if name not in hooks:
            raise unknown(f"hook of the callback {kind}", name, hooks)
        try:
            inspect.signature(getattr(callback, name)).bind(None)
        except (TypeError, ValueError):
            raise BadInputError(f"{kind}.{name} cannot be called with the run: write def {name}(self, run)") from None
