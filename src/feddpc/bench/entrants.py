"""What is measured: a way to run rounds of a workload, and the times that it took."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.bench.eager import Eager
from feddpc.bench.workloads import Workload
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.base import Engine
from feddpc.engines.cuda.captured import Cuda
from feddpc.errors import BadInputError, FeddpcError
from feddpc.experiment import Experiment
from feddpc.method_changes import for_method
from feddpc.methods.base import Method
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs import engine_choice
from feddpc.torch_globals import set_precision

WARM_UP = 2
#: What is measured: every engine of one process, and the one for GPUs with its compiler.
ENGINES: dict[str, Callable[[], Engine]] = {
    **{name: engine for name, engine in engine_choice.ENGINES.items() if name != "distributed"},
    "cuda-compiled": partial(Cuda, compile=True),
}


def engine_names() -> list[str]:
    """Return the names of the engines that are measured."""
    return list(ENGINES)


@dataclass(eq=False)
class Entrant(ABC):
    """One way to run rounds, and the times of its rounds with evaluation and without.

    These are two separate runs, because an engine may put training and evaluation into one program.
    """

    way: str
    method: str
    precision: str
    device: str
    warm_up: float = 0.0  #: of the run with evaluation
    spent: float = 0.0
    whole: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    error: str | None = None

    last: float = field(default=0.0, init=False)  #: seconds of the last round with evaluation before the turns

    @abstractmethod
    def warm(self) -> None:
        """Make everything that the rounds need, and the first rounds."""

    @abstractmethod
    def _time_both(self) -> tuple[float, float]:
        """Make a round with evaluation and one without; return the seconds of each."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to give back
        """Give back what the rounds need."""

    def turn(self) -> None:
        """Time one round with evaluation and one without."""
        with self._noting_errors():
            whole, training = self._time_both()
            self.whole.append(whole)
            self.training.append(training)
            self.spent += whole + training

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Set torch up for this entrant; note what goes wrong, since an engine that cannot run here is a row too."""
        try:
            set_precision(self.precision)  # a setting of the process, which another entrant may have changed
            if self.way == "eager":
                torch.backends.cudnn.deterministic = False  # torch's default
            yield
        except Exception as error:
            text = str(error).strip() or "no reason given"
            own = isinstance(error, FeddpcError)
            self.error = (text if own else f"{type(error).__name__}: {text}").splitlines()[0]

    def row(self, base: Entrant) -> dict[str, Any]:
        """Return the figures: medians over turns, and the speed relative to ``base``, turn by turn."""
        row: dict[str, Any] = {"way": self.way, "method": self.method, "precision": self.precision}
        if self.error or not self.whole:
            return row | {"error": self.error or "no turn was made"}
        whole = statistics.median(self.whole)
        return row | {
            "round": whole,
            "training": statistics.median(self.training),
            "evaluation": statistics.median(w - t for w, t in zip(self.whole, self.training, strict=True)),
            "fastest": min(self.whole),
            "slowest": max(self.whole),
            "rounds_a_second": 1 / whole,
            "speed": _ratio(base.whole, self.whole),
            "training_speed": _ratio(base.training, self.training),
            "warm_up": self.warm_up,
            "turns": len(self.whole),
        }


@dataclass(eq=False)
class LocalEntrant(Entrant):
    """Rounds in this process."""

    build: Callable[[bool], Callable[[], object]] = field(repr=False, kw_only=True)  #: a run with evaluation or without

    def warm(self) -> None:
        """Build both runs and make the first rounds, compilation included."""
        with self._noting_errors():
            self.warm_up, self.round = timed(lambda: self._begin(True), self.device)
            without, self.train = timed(lambda: self._begin(False), self.device)
            # Both make as many rounds, so that in every turn they, and all entrants, have the same cohort.
            self.last, last = self._time_both()
            self.spent = self.warm_up + without + self.last + last

    def _begin(self, evaluate: bool) -> Callable[[], object]:
        run = self.build(evaluate)
        for _ in range(WARM_UP):
            run()
        return run

    def _time_both(self) -> tuple[float, float]:
        return timed(self.round, self.device)[0], timed(self.train, self.device)[0]


def _ratio(base: list[float], own: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, own, strict=False))


class Workbench:
    """The federation of a workload, set up once per precision; all share data and partition."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.data = workload, workload.data()
        self.usual = build(workload.config(device=device), data=self.data)
        self.device = str(self.usual.w0.device)
        self.by_precision: dict[str, Experiment] = {Config.precision: self.usual}

    def experiment(self, precision: str) -> Experiment:
        """Return the federation in one precision."""
        if precision not in self.by_precision:
            config = self.workload.config(device=self.device, precision=precision)
            self.by_precision[precision] = build(config, data=self.data, partition=self.usual.partition)
        return self.by_precision[precision]

    def entrant(self, engine: str, method: str, precision: str) -> Entrant:
        """Return a way through one of the engines."""

        def build(evaluate: bool) -> Callable[[], object]:
            return self.run(ENGINES[engine](), methods.create(method), precision, evaluate)

        return LocalEntrant(engine, method, precision, self.device, build=build)

    def run(self, engine: Engine, method: Method, precision: str, evaluate: bool) -> Callable[[], object]:
        """Begin a run; return what makes its next round."""
        # Every run has a copy of its own, which prepares the batches of this run's next round.
        experiment = replace(for_method(self.experiment(precision), method), evaluates=evaluate)
        if why := engine.refuses(experiment.task):
            raise BadInputError(why)
        state = RunState.of(experiment, method)
        return lambda: run_round(experiment, method, engine, state)

    def eager(self) -> list[Entrant]:
        """Return the plain loop, which is FedAvg: in float32, and on a GPU also with matrix units that round."""

        def build(evaluate: bool) -> Callable[[], object]:
            plain = Eager(self.usual)
            return plain if evaluate else plain.train

        kinds = [Config.precision] if self.device == "cpu" else [Config.precision, "tf32"]
        return [LocalEntrant("eager", "fedavg", precision, self.device, build=build) for precision in kinds]
