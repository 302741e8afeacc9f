"""Optuna's samplers with ask and tell; needs the extra ``tune``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from feddpc.errors import BadInputError, unknown
from feddpc.study.space import Categorical, Range

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

#: Optuna's samplers by the names used here.
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "qmc": "QMCSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
}


def check_sampler(name: str) -> None:
    """Refuse a sampler that does not exist or cannot be used here."""
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    for package in ("optuna", *(["cmaes"] if name == "cmaes" else [])):
        if find_spec(package) is None:
            raise BadInputError(f"sampler {name!r} needs {package}: pip install 'optuna>=3.5' 'cmaes>=0.10'")


class OptunaSearch:
    """The trials of one method; they depend on the seed and the scores only."""

    def __init__(
        self, axes: Mapping[str, Range | Categorical], trials: int, seed: int, sampler: str, batch: int
    ) -> None:
        import optuna

        check_sampler(sampler)
        self.left, self.batch = trials, batch
        self.choices = {key: axis.values for key, axis in axes.items() if isinstance(axis, Categorical)}
        with _quiet():
            chosen_sampler = getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed)
            self.study = optuna.create_study(direction="maximize", sampler=chosen_sampler)
            self.space = {key: _distribution(axis) for key, axis in axes.items()}
        self.open: list[Trial] = []

    def ask(self) -> list[dict[str, Any]]:
        """Return the next settings; none when the budget is spent."""
        count = min(self.batch, self.left)
        self.left -= count
        with _quiet():
            self.open = [self.study.ask(self.space) for _ in range(count)]
        return [
            {key: self.choices[key][value] if key in self.choices else value for key, value in trial.params.items()}
            for trial in self.open
        ]

    def tell(self, scores: Sequence[float | None]) -> None:
        """Take the scores."""
        from optuna.trial import TrialState

        with _quiet():
            for trial, score in zip(self.open, scores, strict=True):
                if score is None:
                    self.study.tell(trial, state=TrialState.FAIL)
                else:
                    self.study.tell(trial, score)
        self.open = []


def _distribution(axis: Range | Categorical) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, Categorical):  # by number, because Optuna knows only plain values
        return CategoricalDistribution(range(len(axis.values)))
    if axis.is_whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return FloatDistribution(axis.low, axis.high, log=axis.is_log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log and its warnings about experimental features."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
