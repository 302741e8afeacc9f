"""Metrics: what an evaluation measures, which direction is better, and how values are shown.

A task lists its metrics, the primary one first. Records hold their values by name (``test_accuracy``, ``test_loss``,
``validation_accuracy``); tables, curves, sweeps and the page read from the metric how to rank and how to write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from feddpc.errors import BadInputError, unknown

T = TypeVar("T")
DIRECTIONS = ("max", "min")
#: Which samples a metric of a record was measured on; the second ones are those held out of training.
PARTS = ("test", "validation")


@dataclass(frozen=True)
class Metric:
    """One number that an evaluation gives.

    >>> mse = Metric("mse", "min")
    >>> mse.pick([0.3, 0.1, 0.2]), mse.text(0.123456), mse.superlative
    (0.1, '0.1235', 'lowest')
    """

    name: str  #: the key in what a task's ``evaluate`` returns
    direction: str = "max"  #: whether the largest value is best, or the smallest: max or min
    percent: bool = False  #: whether a share from 0 to 1 is shown in percent
    label: str = ""  #: for headings and axes; by default the name

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise unknown(f"direction of the metric {self.name!r}", self.direction, DIRECTIONS)

    @classmethod
    def read(cls, table: Any) -> Metric:
        """Return the metric that `as_dict` has written, or raise if the table is another thing."""
        kinds = {"name": str, "direction": str, "percent": bool, "label": str}
        if not isinstance(table, Mapping) or not table.get("name"):
            raise BadInputError(f"{table!r} describes no metric: it must be a table with a name")
        known = {key: table[key] for key in kinds if key in table}
        for key, value in known.items():
            if type(value) is not kinds[key]:
                raise BadInputError(f"{key} = {value!r} of a metric: must be {kinds[key].__name__}")
            if isinstance(value, str) and not value.isprintable():
                raise BadInputError(f"{key} = {value!r} of a metric: must be printable")
        return cls(**known)

    def as_dict(self) -> dict[str, Any]:
        """Return the metric for JSON."""
        return asdict(self)

    @property
    def words(self) -> str:
        """What people call it."""
        return self.label or self.name.replace("_", " ")

    @property
    def title(self) -> str:
        """What stands at an axis.

        >>> ACCURACY.title, LOSS.title
        ('accuracy (%)', 'loss')
        """
        return f"{self.words} (%)" if self.percent else self.words

    @property
    def heading(self) -> str:
        """What stands behind "best" at the head of a column; accuracies in percent are so usual that % will do."""
        if self == ACCURACY:
            return "%"
        return f"{self.words} %" if self.percent else self.words

    @property
    def superlative(self) -> str:
        """What the best value is: highest or lowest."""
        return "highest" if self.direction == "max" else "lowest"

    @property
    def factor(self) -> float:
        """What values are multiplied by when they are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def sign(self) -> int:
        """What makes larger better: values times this."""
        return 1 if self.direction == "max" else -1

    def key(self, part: str = "test") -> str:
        """Return the name of its value in a record: ``test_accuracy``, ``validation_accuracy``."""
        return f"{part}_{self.name}"

    def pick(self, items: Iterable[T], value: Callable[[T], Any] = lambda item: item) -> T | None:
        """Return the first item with the best value; None if there are no items."""
        pick = max if self.direction == "max" else min
        return pick(items, key=value, default=None)

    def text(self, value: float | None, spread: float | None = None) -> str:
        """Return a value for a table, with its spread if there is one.

        >>> ACCURACY.text(0.544, 0.0031), ACCURACY.text(0.5), ACCURACY.text(None), LOSS.text(2.30259, 0.0123)
        ('54.40 ± 0.31', '50.00', '-', '2.303 ± 0.012')
        """
        if value is None:
            return "-"
        if self.percent:
            return f"{100 * value:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")
        return f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")

    def with_unit(self, value: float | None) -> str:
        """Return a value for running text.

        >>> ACCURACY.with_unit(0.5), LOSS.with_unit(0.5)
        ('50.00 %', '0.5')
        """
        return self.text(value) + (" %" if self.percent and value is not None else "")


ACCURACY = Metric("accuracy", percent=True)
LOSS = Metric("loss", "min")
#: What a classification measures, and what runs measured that do not say what they did.
CLASSIFICATION = (ACCURACY, LOSS)
#: Metrics by name, which a process that sees only records looks up; a task's own are in its run folder.
METRICS = {
    metric.name: metric
    for metric in (
        *CLASSIFICATION,
        Metric("top-5", percent=True, label="top-5 accuracy"),
        Metric("f1", label="macro F1"),
        Metric("mse", "min", label="mean squared error"),
        Metric("mae", "min", label="mean absolute error"),
        Metric("r2", label="R²"),
        Metric("perplexity", "min"),
        Metric("auc", label="area under the ROC curve"),
    )
}


#: Words in the names of metrics of which less is better.
LESS_IS_BETTER = {"loss", "error", "err", "mse", "rmse", "mae", "mape", "perplexity", "ppl", "nll", "cost", "distance"}


def guess_metrics(names: Iterable[str]) -> tuple[Metric, ...]:
    """Return metrics of which only the names are known, losses last: the first one is primary.

    >>> [(metric.name, metric.direction) for metric in guess_metrics(["eval_loss", "eval-acc", "loss", "f1"])]
    [('eval-acc', 'max'), ('f1', 'max'), ('eval_loss', 'min'), ('loss', 'min')]
    """
    found = []
    for name in names:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        found.append(METRICS.get(name) or Metric(name, "min" if words & LESS_IS_BETTER else "max"))
    return tuple(sorted(found, key=lambda metric: "loss" in metric.name.lower()))


def named(part: str, metrics: Sequence[Metric], values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values as a record has them: one per metric, None where there is none.

    >>> named("test", CLASSIFICATION, {"loss": 0.5})
    {'test_accuracy': None, 'test_loss': 0.5}
    """
    return {metric.key(part): values.get(metric.name) for metric in metrics}


def primary_name(record: Mapping[str, Any]) -> str:
    """Return the name of the primary metric of a record: the first that was measured on the test set.

    >>> primary_name({"round": 1, "test_accuracy": 0.5, "test_loss": 1.0})
    'accuracy'
    """
    return next((key.removeprefix("test_") for key in record if key.startswith("test_")), LOSS.name)
