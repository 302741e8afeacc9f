"""How metrics are computed: from sums over the test set where that is possible, else from all outputs at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddpc.errors import BadInputError, unknown
from feddpc.registry import Registry
from feddpc.tasks.metrics import ACCURACY, LOSS, METRICS, Metric

#: What names of metrics start with that clients have after local steps.
FINETUNED = "finetuned_"
ALL = ("classes", "floats", "multihot", "tokens")


class Totals(NamedTuple):
    """What metrics are made of: the number of samples or tokens, their mean loss, and the sums of a metric."""

    number: int
    loss: float
    sums: list[float]


@dataclass(frozen=True)
class Measure:
    """A metric and how it is computed; either from totals, or from the whole of outputs and targets."""

    metric: Metric
    targets: tuple[str, ...] = ALL
    #: Sums over some samples, made of their outputs and targets.
    totals: Callable[[Tensor, Tensor], Tensor] | None = None
    #: How many sums there are, if there is a fixed number, and how many per output.
    single: int = 0
    per_output: int = 0
    #: The metric, from the sums over all samples.
    value: Callable[[Totals], float] = lambda seen: seen.loss
    #: The metric, from the outputs and targets of all samples.
    whole: Callable[[Tensor, Tensor], Any] | None = None
    #: Whether it has no value where targets do not vary.
    may_lack: bool = False

    @property
    def own(self) -> bool:
        """Whether it is one of the user's, and not one of the library."""
        return self is not MEASURES.get(self.metric.name)

    def size(self, outputs: int) -> int:
        """Return how many sums there are for a network with so many outputs."""
        return self.single + self.per_output * outputs

    def compute(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of all outputs and targets."""
        assert self.whole is not None
        try:
            return float(self.whole(outputs, targets))
        except Exception as error:
            raise BadInputError(
                f"metric {self.metric.name} fails for outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)}: {type(error).__name__}: {error}; a metric takes all outputs and targets and "
                "returns one number: correct it"
            ) from error


def _share(seen: Totals) -> float:
    return seen.sums[0] / seen.number


def _correct(outputs: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():  # several labels: the share of them that is right
        return ((outputs > 0) == (y > 0.5)).double().mean(-1).sum()
    return (outputs.argmax(-1) == y).sum()


def _among_five(outputs: Tensor, y: Tensor) -> Tensor:
    best = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    return (best == y.unsqueeze(-1)).any(-1).sum()


def _confusion(outputs: Tensor, y: Tensor) -> Tensor:
    """Count true positives, predictions and labels, per class or label."""
    if y.is_floating_point():
        said, true = (outputs > 0).double(), y.double()
    else:
        classes = outputs.shape[-1]
        said = torch.nn.functional.one_hot(outputs.argmax(-1), classes).double()
        true = torch.nn.functional.one_hot(y, classes).double()
    return torch.stack([(said * true).sum(0), said.sum(0), true.sum(0)])


def _macro_f1(seen: Totals) -> float:
    """Mean over the classes that occur, among labels or predictions, of 2 TP / (predicted + labelled)."""
    hits, said, true = np.array(seen.sums).reshape(3, -1)
    occurs = said + true > 0
    return float((2 * hits[occurs] / (said + true)[occurs]).mean()) if occurs.any() else 0.0


def _per_sample(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).mean(-1).sum()


def _moments(outputs: Tensor, y: Tensor) -> Tensor:
    """Sum squared errors, targets and squared targets, per output."""
    outputs, y = (t.double().reshape(len(t), -1) for t in (outputs, y))
    return torch.stack([((outputs - y) ** 2).sum(0), y.sum(0), (y**2).sum(0)])


def _r2(seen: Totals) -> float:
    """Mean over outputs of 1 - residual / total sum of squares."""
    errors, y, squares = np.array(seen.sums).reshape(3, -1)
    spread = squares - y**2 / seen.number
    return float(np.mean(1 - errors / np.where(spread > 0, spread, np.nan)))


def _auc(outputs: Tensor, y: Tensor) -> float:
    """Area under the ROC curve, by ranks; the mean over classes or labels, each against the rest."""
    from scipy.stats import rankdata  # a second to import

    scores, labels = outputs.double().cpu().numpy(), y.cpu().numpy()
    if labels.ndim == 1:
        if scores.shape[1] == 2:  # two classes: one curve
            scores, labels = (scores[:, 1] - scores[:, 0])[:, None], labels[:, None] == 1
        else:
            labels = labels[:, None] == np.arange(scores.shape[1])
    areas = []
    for score, positive in zip(scores.T, labels.T.astype(bool), strict=True):
        n, m = int(positive.sum()), int((~positive).sum())
        if n and m:
            areas.append((rankdata(score)[positive].sum() - n * (n + 1) / 2) / (n * m))
    return float(np.mean(areas)) if areas else math.nan


def _perplexity(seen: Totals) -> float:
    return math.exp(min(seen.loss, 700.0))


MEASURES = {
    measure.metric.name: measure
    for measure in (
        Measure(ACCURACY, ("classes", "multihot", "tokens"), _correct, 1, value=_share),
        Measure(METRICS["top-5"], ("classes", "tokens"), _among_five, 1, value=_share),
        Measure(METRICS["f1"], ("classes", "multihot"), _confusion, per_output=3, value=_macro_f1),
        Measure(METRICS["mse"], ("floats",), lambda o, y: _per_sample((o - y) ** 2), 1, value=_share),
        Measure(METRICS["mae"], ("floats",), lambda o, y: _per_sample((o - y).abs()), 1, value=_share),
        Measure(METRICS["r2"], ("floats",), _moments, per_output=3, value=_r2, may_lack=True),
        Measure(METRICS["perplexity"], ("classes", "tokens"), value=_perplexity),
        Measure(METRICS["auc"], ("classes", "multihot"), whole=_auc, may_lack=True),
        Measure(LOSS),
    )
}


#: Metrics of the user's own, in files.
FUNCTIONS: Registry[Any] = Registry("metric", {}, accepts=inspect.isfunction)


def choose_measures(wanted: Sequence[Any], target: str) -> tuple[Measure, ...]:
    """Return measures by name, or made of functions ``(outputs, targets) -> number`` and of torchmetrics objects."""
    chosen = tuple(measure_of(one) for one in wanted)
    names = [measure.metric.name for measure in chosen]
    if len(set(names)) < len(names):
        raise BadInputError(f"metrics = {names}: each can be measured once")
    for measure in chosen:
        _check_name(measure)
    for measure in chosen:
        if target and target not in measure.targets:
            able = [name for name, other in MEASURES.items() if target in other.targets]
            raise BadInputError(
                f"metric {measure.metric.name} is not defined for targets of kind {target}: choose among "
                f"{', '.join(able)}, or give a function"
            )
    return chosen


def _check_name(measure: Measure) -> None:
    """Raise if values of a metric would replace others in records and summaries: ``test_loss``, ``best_round``."""
    name = measure.metric.name
    if measure.own and (name in (LOSS.name, "round") or name.startswith(FINETUNED)):
        raise BadInputError(f"metric {name!r}: records have other values of this name: give the function another one")


def listed_metrics(measures: Sequence[Measure]) -> tuple[Metric, ...]:
    """Return what is shown of ``measures``; the loss is always among them."""
    shown = tuple(measure.metric for measure in measures)
    return shown if LOSS in shown else (*shown, LOSS)


def measure_of(wanted: Any) -> Measure:
    """Return the measure that a name, a function or a torchmetrics object stands for."""
    if isinstance(wanted, Measure):
        return wanted
    if isinstance(wanted, str):
        if wanted in FUNCTIONS.entries:
            own = measure_of(FUNCTIONS.entries[wanted])
            return replace(own, metric=replace(own.metric, name=wanted))
        if wanted not in MEASURES:
            raise unknown("metric", wanted, [*MEASURES, *FUNCTIONS.entries])
        return MEASURES[wanted]
    if all(hasattr(wanted, hook) for hook in ("update", "compute", "reset")):  # torchmetrics
        name, better = type(wanted).__name__.lower(), getattr(wanted, "higher_is_better", True)
        return Measure(Metric(name, "min" if better is False else "max"), whole=_torchmetric(wanted))
    if callable(wanted):
        name = getattr(wanted, "__name__", type(wanted).__name__)
        return Measure(Metric(name, getattr(wanted, "direction", "max")), whole=wanted)
    raise BadInputError(f"metrics: {wanted!r} is neither a name nor a function of outputs and targets")


def _torchmetric(metric: Any) -> Callable[[Tensor, Tensor], Any]:
    def compute(outputs: Tensor, targets: Tensor) -> Any:
        metric.reset()
        metric.to(outputs.device).update(outputs, targets if targets.is_floating_point() else targets.long())
        return metric.compute()

    return compute
