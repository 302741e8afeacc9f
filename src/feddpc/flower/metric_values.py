"""Metrics that functions of the user return, in the types that records and Flower's messages can hold."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.common.logger import log
from torch import Tensor


class MetricValues:
    """Converts metrics, and warns once of each one that is no number.

    >>> MetricValues().convert({"loss": np.float32(0.5), "hits": [1, 2], "name": "a"})
    {'loss': 0.5, 'hits': [1, 2]}
    """

    def __init__(self) -> None:
        self._named: set[str] = set()

    def convert(self, values: Mapping[str, Any] | None) -> MetricRecord:
        """Return the metrics that are numbers or lists of numbers; nothing if there are none."""
        numbers = {name: _convert(value) for name, value in (values or {}).items()}
        for name in sorted({name for name, value in numbers.items() if value is None} - self._named):
            self._named.add(name)
            kind = type((values or {})[name]).__name__
            log(WARNING, "metric %r is no number but of type %s: it is left out of the records", name, kind)
        return MetricRecord({name: value for name, value in numbers.items() if value is not None})


def _convert(value: Any) -> int | float | list[int] | list[float] | None:
    """Return a number or a list of numbers, None for anything else."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray | Tensor) else value
    if not isinstance(value, list | tuple):
        return _number(value)
    numbers = [_number(each) for each in value]
    whole = [each for each in numbers if isinstance(each, int)]
    if len(whole) == len(numbers):
        return whole
    return None if None in numbers else [float(each) for each in numbers if each is not None]


def _number(value: Any) -> int | float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
