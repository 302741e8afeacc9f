"""Whole rounds of every engine, turn by turn in one process, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.bench.eager import Eager
from feddpc.bench.workloads import Workload
from feddpc.build import build, for_method
from feddpc.config import Config
from feddpc.engines.base import Engine
from feddpc.engines.cuda.captured import Cuda
from feddpc.errors import BadInputError, FeddpcError
from feddpc.experiment import Experiment
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs import engine_choice
from feddpc.torch_globals import set_precision

WARM_UP = 2
#: Turns that everyone gets, and that nobody gets more than, when none were asked for.
LEAST, MOST = 2, 15
#: Seconds for the rounds of one workload when no number of turns was asked for.
LIMIT = 30.0

Tell = Callable[[str], None]


def precisions() -> list[str]:
    """Return the precisions that a configuration may name, the default one first."""
    return sorted(typing.get_args(typing.get_type_hints(Config)["precision"]), key=lambda p: p != Config.precision)


#: What is measured: every engine, and the one for GPUs with its compiler.
ENGINES: dict[str, Callable[[], Engine]] = {**engine_choice.ENGINES, "cuda-compiled": partial(Cuda, compile=True)}


@dataclass(eq=False)
class Entrant:
    """One way to run rounds, with evaluation and without, and what they took.

    Two runs of their own, because an engine may put training and evaluation into one program.
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
        """Build it and make the first rounds, compilation included; whatever goes wrong is written down."""
        self._guarded(self._warm)

    def turn(self) -> None:
        """Time one round with evaluation and one without."""
        self._guarded(self._turn)

    def _warm(self) -> None:
        def begin(evaluate: bool) -> Callable[[], object]:
            run = self.build(evaluate)
            for _ in range(WARM_UP):
                run()
            return run

        self.warm_up, self.round = timed(lambda: begin(True), self.device)
        without, self.train = timed(lambda: begin(False), self.device)
        # Both make as many rounds, so that in every turn they, and all entrants, have the same cohort.
        self.last, last = (timed(run, self.device)[0] for run in (self.round, self.train))
        self.spent = self.warm_up + without + self.last + last

    def _turn(self) -> None:
        whole, training = (timed(run, self.device)[0] for run in (self.round, self.train))
        self.whole.append(whole)
        self.training.append(training)
        self.spent += whole + training

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            set_precision(self.precision)  # it is the process's, and another may have run before
            if self.way == "eager":
                torch.backends.cudnn.deterministic = False  # as torch has it
            work()
        except Exception as error:  # an engine that cannot run here is a line in the table
            text = str(error).strip() or "no reason given"
            own = isinstance(error, FeddpcError)
            self.error = (text if own else f"{type(error).__name__}: {text}").splitlines()[0]

    @property
    def evaluation(self) -> list[float]:
        """What evaluation added, turn by turn."""
        return [w - t for w, t in zip(self.whole, self.training, strict=True)]

    def row(self, base: Entrant) -> dict[str, Any]:
        """Return what was found, as numbers: medians over turns, and the speed against ``base`` turn by turn."""
        row: dict[str, Any] = {"way": self.way, "method": self.method, "precision": self.precision}
        if self.error or not self.whole:
            return row | {"error": self.error or "no turn was made"}
        whole = statistics.median(self.whole)
        return row | {
            "round": whole,
            "training": statistics.median(self.training),
            "evaluation": statistics.median(self.evaluation),
            "slowest": max(self.whole),
            "rounds_a_second": 1 / whole,
            "speed": _ratio(base.whole, self.whole),
            "training_speed": _ratio(base.training, self.training),
            "warm_up": self.warm_up,
            "turns": len(self.whole),
        }


def _ratio(base: list[float], own: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, own, strict=False))


class Settings:
    """The federation of a workload in every precision that is asked for; data and partition are made once."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.data = workload, workload.data()
        self.made: dict[str, Experiment] = {}
        self.device = device
        self.device = self[Config.precision].config.device

    def __getitem__(self, precision: str) -> Experiment:
        if precision not in self.made:
            first = next(iter(self.made.values()), None)
            config = self.workload.config(device=self.device, precision=precision)
            self.made[precision] = build(config, data=self.data, partition=first.partition if first else None)
        return self.made[precision]

    def entrant(self, engine: str, method: str, precision: str) -> Entrant:
        """Return a way through one of the engines."""

        def build(evaluate: bool) -> Callable[[], object]:
            rule = methods.create(method)
            # A copy of its own, as every run has: it knows the batches of the next round, and of no other.
            experiment = replace(for_method(self[precision], rule), evaluates=evaluate)
            machine = ENGINES[engine]()
            if why := machine.refuses(experiment.task):
                raise BadInputError(why)
            progress = RunState.begin(rule, experiment.w0, len(experiment.population))
            return lambda: run_round(experiment, rule, machine, progress)

        return Entrant(engine, method, precision, build, self.device)

    def eager(self) -> list[Entrant]:
        """Return the plain loop, which is FedAvg: in float32, and on a GPU also with matrix units that round."""

        def build(evaluate: bool) -> Callable[[], object]:
            plain = Eager(self[Config.precision])
            return plain if evaluate else plain.train

        kinds = [Config.precision] if self.device == "cpu" else [Config.precision, "tf32"]
        return [Entrant("eager", "fedavg", precision, build, self.device) for precision in kinds]


def measure(
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
    settings = Settings(workload, device)
    entrants = settings.eager() if against == "eager" else []
    for precision in wanted or [Config.precision]:
        entrants += [settings.entrant(engine, name, precision) for name in names for engine in engines or ENGINES]
    _warm(entrants, tell)
    fit = [e for e in entrants if not e.error and e.way != "eager"]
    others = [p for p in precisions()[1:] if p != "float64"]
    if wanted is None and fit and settings.device != "cpu":
        fastest = min(fit, key=lambda e: e.last).way
        more = [settings.entrant(fastest, name, precision) for name in names for precision in others]
        _warm(more, tell)
        entrants += more
    _take_turns([e for e in entrants if not e.error], rounds, tell)
    if plain := [e for e in entrants if e.way == "eager" and not e.error and e.whole]:
        quicker = min(plain, key=lambda e: statistics.median(e.whole))
        entrants.sort(key=lambda e: e is not quicker)  # the others stay in their order
    base = next((e for e in entrants if not e.error), entrants[0])
    config = settings[Config.precision].config
    return {
        "workload": workload.name,
        "title": workload.title,
        "model": config.model,
        "clients": config.clients,
        "cohort": config.cohort,
        "batch_size": config.batch_size,
        "alpha": workload.alpha,
        "train_images": workload.train,
        "test_images": workload.test,
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
