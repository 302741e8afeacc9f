"""What the tests of sweeps share: small runs, and results without what a clock says."""

import re
from pathlib import Path

import torch

from feddpc.config import Config
from feddpc.study import InProcess, Processes, RunResult, RunSpec, StudyPlan, run_study
from feddpc.study.overrides import Overrides
from feddpc.study.space import Space
from feddpc.tasks.metrics import ACCURACY

SMALL = {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "clients": 10,
    "cohort": 3,
    "rounds": 4,
    "batch_size": 16,
    "validation": 0.1,
    "engine": "loop",
    "device": "cpu",
}


def config(**values) -> Config:
    return Config.read({**SMALL, **values})


def specs(methods=("fedavg", "feddpc"), rates=(0.3, 0.1), seeds=(0,), **values) -> list[RunSpec]:
    return [
        RunSpec(config(method=m, lr=lr, seed=s, **values), f"{m} {lr} {s}")
        for m in methods
        for lr in rates
        for s in seeds
    ]


def thirty_rounds(folder: str, processes: int) -> None:
    """Run the sweep of 30 rounds that tests kill, in this process or in so many others."""
    torch.set_num_threads(1)
    workers = Processes(processes) if processes else InProcess()
    run_study(specs(rounds=30), Path(folder), workers=workers, checkpoint_seconds=0.01)


def numbers(outcomes: list[RunResult]) -> list[tuple]:
    """Everything that must not depend on who ran them, or how often they were interrupted."""
    return [
        (
            *(o.key, o.status, o.rounds, o.best, o.best_round, o.last10, o.final),
            *(o.validation, o.validation_round, o.validated),
        )
        for o in outcomes
    ]


def records(folder: Path) -> dict[str, bytes]:
    """The rounds of every run, byte for byte, but for the seconds."""
    return {
        path.parent.name: re.sub(rb'"seconds": [^,]+,', b"", path.read_bytes())
        for path in sorted((folder / "items").glob("*/rounds.jsonl"))
    }


def outcome(method="fedavg", lr=0.1, seed=0, status="done", test=0.5, valid=0.5, at=0.4, hyper=None, **more):
    """A result that was never run."""
    spec = RunSpec(Config(method=method, lr=lr, seed=seed, rounds=20, hyper=hyper or {}, **more))
    known = {"best": test, "best_round": 10, "validation": valid, "validation_round": 8}
    known |= {"validated": at, "last10": test - 0.1}
    return RunResult(key="k", spec=spec, status=status, path=Path("x"), **(known if status != "missing" else {}))


class Made:
    """Runs that take no time: the score of a setting is a function of its rate, rounds and seed."""

    def __init__(self, score, status="done"):
        self.score, self.status, self.asked = score, status, []

    def __call__(self, specs):
        self.asked.append([(s.config.lr, s.config.rounds, s.config.seed) for s in specs])
        return [self.result(spec) for spec in specs]

    def result(self, spec):
        value = self.score(spec.config.lr, spec.config.rounds, spec.config.seed)
        status = self.status if isinstance(self.status, str) else self.status(spec.config)
        known = {"best": value, "validation": value, "validated": value, "rounds": spec.config.rounds}
        return RunResult(key="k", spec=spec, status=status, path=None, metric=ACCURACY, **known)


def ladder_plan(**values):
    overrides = Overrides()
    overrides.absorb({**SMALL, "rounds": 8, **values}, ["fedavg", "feddpc"])
    space = Space.grid({"lr": [0.3, 0.1, 0.03], "feddpc.lam": [0.0, 1.0]})
    return StudyPlan(["fedavg", "feddpc"], [0, 1], overrides, space, ladder=True)
