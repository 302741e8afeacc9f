"""What clients measured on their own test samples: read from replies, and averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from flwr.app import MetricRecord, RecordDict

from feddpc.flower.messages import expect, only_record
from feddpc.flower.screening import Bounds, check_number
from feddpc.tasks.metrics import LOSS, Metric

#: The number of test samples of a client, and its metrics by name.
Evaluation = tuple[int, dict[str, float]]


def read_evaluation(content: RecordDict, bounds: Bounds, known: Sequence[Metric]) -> Evaluation:
    """Return the number of test samples and the metrics of a client; only the loss is always defined."""
    metrics = dict(only_record(content, MetricRecord))
    examples = bounds.examples(metrics.pop("num-examples", None))
    expect(metrics, [LOSS.name], "the evaluation", [metric.name for metric in known])
    return examples, {name: check_number(name, value, torch.float64) for name, value in metrics.items()}


def average_evaluations(evaluations: Iterable[Evaluation], known: Sequence[Metric]) -> dict[str, float]:
    """Average every metric over the clients that have it, by their numbers of test samples.

    >>> average_evaluations([(1, {"loss": 0.5}), (3, {"loss": 0.1})], [LOSS])
    {'loss': 0.2}
    """
    evaluations, means = list(evaluations), {}
    for name in (metric.name for metric in known):
        measured = [(metrics[name], count) for count, metrics in evaluations if name in metrics]
        if total := sum(count for _, count in measured):
            means[name] = sum(value * (count / total) for value, count in measured)
    return means
