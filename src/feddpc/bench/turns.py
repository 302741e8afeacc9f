"""Whole rounds of every engine, turn by turn in one process, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
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
from feddpc.config import Config, choices_of
from feddpc.engines.base import Engine
from feddpc.engines.cuda.captured import Cuda
from feddpc.errors import BadInputError, FeddpcError
from feddpc.experiment import Experiment
from feddpc.method_changes import for_method
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs import engine_choice
from feddpc.torch_globals import set_precision

WARM_UP = 2
#: The least and the most turns of each entrant, when no number was asked for.
LEAST, MOST = 2, 15
#: Seconds for the rounds of one workload when no number of turns was asked for.
LIMIT = 30.0

Tell = Callable[[str], None]


#: What is measured: every engine, and the one for GPUs with its compiler.
ENGINES: dict[str, Callable[[], Engine]] = {**engine_choice.ENGINES, "cuda-compiled": partial(Cuda, compile=True)}


@dataclass(eq=False)
class Entrant:
    """One way to run rounds, and the times of its rounds with evaluation and without.

    These are two separate runs, because an engine may put training and evaluation into one program.
    """

    way: str
    method: str
    precision: str
    build: Callable[[bool], Callable[[], object]] = field(repr=False)  #: a run with evaluation, or one without
    device: str = "cpu"
    warm_up: float = 0.0  #: of the run with evaluation
    spent: float = 0.0
    whole: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    error: str | None = None

    def warm(self) -> None:
        """Build both runs and make the first rounds, compilation included."""
        with self._noting_errors():
            self.warm_up, self.round = timed(lambda: self._begin(True), self.device)
            without, self.train = timed(lambda: self._begin(False), self.device)
            # Both make as many rounds, so that in every turn they, and all entrants, have the same cohort.
            self.last, last = self._time_both()
            self.spent = self.warm_up + without + self.last + last

    def turn(self) -> None:
        """Time one round with evaluation and one without."""
        with self._noting_errors():
            whole, training = self._time_both()
            self.whole.append(whole)
            self.training.append(training)
            self.spent += whole + training

    def _begin(self, evaluate: bool) -> Callable[[], object]:
        run = self.build(evaluate)
        for _ in range(WARM_UP):
            run()
        return run

    def _time_both(self) -> tuple[float, float]:
        return timed(self.round, self.device)[0], timed(self.train, self.device)[0]

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
            "slowest": max(self.whole),
            "rounds_a_second": 1 / whole,
            "speed": _ratio(base.whole, self.whole),
            "training_speed": _ratio(base.training, self.training),
            "warm_up": self.warm_up,
            "turns": len(self.whole),
        }


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
            rule = methods.create(method)
            # Every run has a copy of its own, which prepares the batches of this run's next round.
            experiment = replace(for_method(self.experiment(precision), rule), evaluates=evaluate)
            machine = ENGINES[engine]()
            if why := machine.refuses(experiment.task):
                raise BadInputError(why)
            state = RunState.of(experiment, rule)
            return lambda: run_round(experiment, rule, machine, state)

        return Entrant(engine, method, precision, build, self.device)

    def eager(self) -> list[Entrant]:
        """Return the plain loop, which is FedAvg: in float32, and on a GPU also with matrix units that round."""

        def build(evaluate: bool) -> Callable[[], object]:
            plain = Eager(self.usual)
            return plain if evaluate else plain.train

        kinds = [Config.precision] if self.device == "cpu" else [Config.precision, "tf32"]
        return [Entrant("eager", "fedavg", precision, build, self.device) for precision in kinds]


def time_rounds(
    workload: Workload,
    *,
    device: str = "auto",
    names: Sequence[str] = ("feddpc",),
    wanted: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    against: str | None = None,
    rounds: int | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Measure all engines on ``workload``; return what was found, the first entrant being what others are compared to.

    ``wanted`` precisions are crossed with all engines. By default all engines run in the usual one, and on a GPU the
    engine that was fastest in all but float64 too, which is for checking. Of two plain loops the faster one counts.
    """
    bench = Workbench(workload, device)
    entrants = bench.eager() if against == "eager" else []
    for precision in wanted or [Config.precision]:
        entrants += [bench.entrant(engine, name, precision) for name in names for engine in engines or ENGINES]
    _warm(entrants, tell)
    able = [e for e in entrants if not e.error and e.way != "eager"]
    if wanted is None and able and bench.device != "cpu":
        fastest = min(able, key=lambda e: e.last).way
        others = [p for p in choices_of("precision") if p not in (Config.precision, "float64")]
        more = [bench.entrant(fastest, name, precision) for name in names for precision in others]
        _warm(more, tell)
        entrants += more
    _take_turns([e for e in entrants if not e.error], rounds, tell)
    if plain := [e for e in entrants if e.way == "eager" and not e.error and e.whole]:
        quicker = min(plain, key=lambda e: statistics.median(e.whole))
        entrants.sort(key=lambda e: e is not quicker)  # the others stay in their order
    base = next((e for e in entrants if not e.error), entrants[0])
    config = bench.usual.config
    return {
        "workload": workload.name,
        "title": workload.title,
        **{key: getattr(config, key) for key in ("model", "clients", "cohort", "batch_size", "partition", "alpha")},
        "train_samples": workload.train,
        "test_samples": workload.test,
        "compared_to": f"{base.way}, {base.method}, {base.precision}",
        "rows": [e.row(base) for e in entrants],
    }


def _warm(entrants: Sequence[Entrant], tell: Tell) -> None:
    for entrant in entrants:
        tell(f"warming up {entrant.way}, {entrant.method}, {entrant.precision}")
        entrant.warm()


def _take_turns(entrants: Sequence[Entrant], rounds: int | None, tell: Tell) -> None:
    """Let all run one round after the other; without ``rounds``, until each has used up its share of the time."""
    share = LIMIT / max(len(entrants), 1)
    for turn in range(rounds or MOST):
        asked = rounds is not None or turn < LEAST
        in_time = sum(e.spent for e in entrants) < LIMIT
        live = [e for e in entrants if not e.error and (asked or (in_time and e.spent < share))]
        if not live or (live == entrants[:1] and len(entrants) > 1):
            return
        tell(f"turn {turn + 1}")
        if entrants[0] not in live and not entrants[0].error:
            live.insert(0, entrants[0])  # what others are compared to takes part to the end
        for entrant in live:
            entrant.turn()
