"""Does what the paper says about FedDPC hold where clients are natural and the model is recurrent?

    python benchmarks/shakespeare.py --out runs/shakespeare --workers 4
    python benchmarks/shakespeare.py --figure docs/images/shakespeare.png    # the picture of stored results

Next character on Shakespeare, one client per speaking role, a two-layer LSTM. Every method gets the same budget:

1. Four client rates times three values of a second setting, for a third of the rounds, with one seed.
2. The best setting of each rate is taken, and of these the best three. They run for all rounds with another seed.
3. The best of these three runs over three more seeds, with all training sequences.

Steps 1 and 2 look only at a tenth of the training sequences that no client trains on. The test set is looked at in step
3. The score of a run is its mean accuracy over the last three evaluations. A finished run is never made again, so the
command may be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from feddpc import methods
from feddpc.bench import machine
from feddpc.config import Config
from feddpc.runs.stop import Stop
from feddpc.study.folder import RunResult
from feddpc.study.runner import Progress, run_study
from feddpc.study.spec import RunSpec
from feddpc.study.workers import InProcess, Processes

RESULTS = Path(__file__).parent / "results" / "shakespeare.json"
RATES = (2.0, 4.0, 8.0, 16.0)
#: Per method, the second setting that is tuned. ``step`` is the server's rate as a multiple of the clients'.
SECOND: dict[str, tuple[dict[str, Any], ...]] = {
    "fedavg": ({"step": 1.0}, {"step": 2.0}, {"step": 3.0}),
    "feddpc": ({"hyper": {"lam": 0.0}}, {"hyper": {"lam": 1.0}}, {"hyper": {"lam": 2.0}}),
    "fedcm": ({"hyper": {"alpha": 0.1}}, {"hyper": {"alpha": 0.4}}, {"hyper": {"alpha": 0.7}}),
    "fedadam": ({"server_lr": 0.003}, {"server_lr": 0.01}, {"server_lr": 0.03}),
    "fedprox": ({"hyper": {"mu": 0.001}}, {"hyper": {"mu": 0.01}}, {"hyper": {"mu": 0.1}}),
    "scaffold": ({"step": 1.0}, {"step": 2.0}, {"step": 3.0}),
    "fedavgm": ({"hyper": {"momentum": 0.5}}, {"hyper": {"momentum": 0.7}}, {"hyper": {"momentum": 0.9}}),
}
COMMON: dict[str, Any] = {
    "data": "shakespeare", "model": "lstm", "cohort": 10, "batch_size": 32, "precision": "float32",
    "evaluate_every": 5,
}  # fmt: skip
#: Seeds of steps 1 and 2; step 3 has the seeds from 0 on.
FIRST_SEED, SECOND_SEED = 100, 101
#: Evaluations that count for the score of a run, the last ones.
LAST = 3
#: The accuracy whose first round is reported.
GOAL = 0.5
#: Values that a method records in every round, of which the mean is reported.
NOTES = ("mean_scale", "mean_cosine", "guarded")


def spec(method: str, lr: float, second: dict[str, Any], **more: Any) -> RunSpec:
    """Return a run of one setting of a method."""
    values = {**COMMON, "method": method, "lr": lr, **second, **more}
    step = values.pop("step", None)
    if step is not None:
        values["server_lr"] = step * lr
    return RunSpec(Config.read(values), tags={"lr": lr, "second": second})


def evaluations(result: RunResult, part: str) -> list[float]:
    """Return the accuracies of a run on ``part``, validation or test, in the order of rounds."""
    values = (record.get(f"{part}_accuracy") for record in result.records())
    return [value for value in values if value is not None]


def score(result: RunResult, part: str = "validation") -> float:
    """Return the mean accuracy over the last evaluations; minus infinity for a run that diverged."""
    last = evaluations(result, part)[-LAST:]
    return sum(last) / len(last) if result.status == "done" and last else -math.inf


def best_rates(results: list[RunResult], count: int) -> list[RunResult]:
    """Return the best setting of each client rate, and of these the best ``count``.

    Settings of one rate tend to collapse together, so the best three of all would often be one setting in three forms.
    """
    by_rate = [max((r for r in results if r.spec.tags["lr"] == lr), key=score) for lr in RATES]
    return sorted((r for r in by_rate if score(r) > -math.inf), key=score, reverse=True)[:count]


def report(results: list[RunResult]) -> list[dict[str, Any]]:
    """Return what is told of tuning runs."""
    return [
        {**r.spec.tags, "status": r.status, "score": _rounded(score(r)), "best": _rounded(r.validation)}
        for r in results
    ]


def final_report(result: RunResult) -> dict[str, Any]:
    """Return what is told of a run on the test set."""
    curve = evaluations(result, "test")
    every, records = COMMON["evaluate_every"], result.records()
    reached = next((every * (k + 1) for k, value in enumerate(curve) if value >= GOAL), None)
    noted = {name: [r[name] for r in records if r.get(name) is not None] for name in NOTES}
    return {
        "seed": result.spec.config.seed,
        "status": result.status,
        "score": _rounded(score(result, "test")),
        "final": _rounded(result.final),
        "best": _rounded(result.best),
        "rounds to goal": reached,
        "seconds per round": _rounded(result.seconds_per_round),
        **{name: _rounded(sum(values) / len(values)) for name, values in noted.items() if values},
        "curve": [_rounded(value) for value in curve],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def study(given: argparse.Namespace, stop: Stop) -> None:
    """Tune, run, and write what came out, as far as there is time."""
    names = given.methods.split(",")
    found: dict[str, Any] = {method: {} for method in names}

    def run(specs: dict[str, list[RunSpec]]) -> dict[str, list[RunResult]]:
        workers = InProcess() if given.workers == 1 else Processes(given.workers)
        flat = [spec for own in specs.values() for spec in own]
        results = iter(run_study(flat, given.out, workers=workers, stop=stop, on_progress=speedometer()))
        return {method: [next(results) for _ in own] for method, own in specs.items()}

    def ended(results: dict[str, list[RunResult]]) -> bool:
        write(given, found)
        return all(result.ended for own in results.values() for result in own)

    tuning = {"validation": 0.1, "rounds": given.grid_rounds, "seed": FIRST_SEED}
    grids = {m: [spec(m, lr, second, **tuning) for lr, second in itertools.product(RATES, SECOND[m])] for m in names}
    first = run(grids)
    for method, own in first.items():
        found[method]["first"] = report(own)
    if not ended(first):
        return

    tuning |= {"rounds": given.rounds, "seed": SECOND_SEED}
    kept = {m: [spec(m, **r.spec.tags, **tuning) for r in best_rates(own, given.keep)] for m, own in first.items()}
    second = run(kept)
    for method, own in second.items():
        found[method]["second"] = report(own)
    if not ended(second):
        return

    chosen = {m: max(own, key=score).spec.tags for m, own in second.items() if own}
    seeds = range(given.seeds)
    finals = run({m: [spec(m, **tags, rounds=given.rounds, seed=s) for s in seeds] for m, tags in chosen.items()})
    for method, own in finals.items():
        found[method]["chosen"] = dict(chosen[method])
        found[method]["runs"] = [final_report(result) for result in own]
        print(f"{method:10s} {chosen[method]} {[run['score'] for run in found[method]['runs']]}")
    ended(finals)


def speedometer() -> Callable[[Progress], None]:
    """Return a function that prints every ten seconds how many rounds there are and how fast they come."""
    began, before, due = time.monotonic(), -1, 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal before, due
        seconds = time.monotonic() - began
        before = progress.rounds if before < 0 else before
        if seconds < due:
            return
        due = seconds + 10
        speed = (progress.rounds - before) / max(seconds, 1e-9)
        print(
            f"{seconds:5.0f} s  {progress.rounds} of {progress.all_rounds} rounds, {speed:.1f} per second; "
            f"{progress.ended} of {progress.total} runs, {progress.failed} failed",
            flush=True,
        )

    return on_progress


def write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what is known so far."""
    about = {
        "machine": machine.describe("cuda" if torch.cuda.is_available() else "cpu"),
        "grid rounds": given.grid_rounds,
        "rounds": given.rounds,
        "kept": given.keep,
        "score": f"mean accuracy over the last {LAST} evaluations",
        "goal": GOAL,
        "common": COMMON,
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(one_run_per_line({**about, "methods": found}) + "\n", encoding="utf-8")


def one_run_per_line(value: Any, indent: str = "", depth: int = 3) -> str:
    """Return JSON that a person can read and compare: deeper than ``depth``, a value is on one line."""
    inner = indent + " "
    if depth and isinstance(value, dict):
        lines = [f"{inner}{json.dumps(k)}: {one_run_per_line(v, inner, depth - 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(entry) for entry in value) + f"\n{indent}]"
    return json.dumps(value)


def draw(source: Path, target: Path) -> None:
    """Draw the mean test accuracy over rounds, best method first, with a band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    stored = json.loads(source.read_text(encoding="utf-8"))
    every = stored["common"]["evaluate_every"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    by_method = {m: 100 * np.array([run["curve"] for run in e["runs"]]) for m, e in stored["methods"].items()}
    for method, curves in sorted(by_method.items(), key=lambda item: -item[1][:, -LAST:].mean()):
        rounds = every * np.arange(1, curves.shape[1] + 1)
        (line,) = axes.plot(rounds, curves.mean(0), label=methods.get(method).title)
        axes.fill_between(rounds, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2)
    figure.savefig(target, dpi=120)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/shakespeare"), help="folder of the runs")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results are written")
    parser.add_argument("--figure", type=Path, help="draw the results that are there, and run nothing")
    parser.add_argument("--methods", default=",".join(SECOND))
    parser.add_argument("--grid-rounds", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--keep", type=int, default=3, help="settings per method in step 2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes that run side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time; start again to continue")
    parser.add_argument("--data", default=COMMON["data"], help="another data set, to try the script")
    parser.add_argument("--model", default=COMMON["model"])
    given = parser.parse_args()
    if given.figure:
        draw(given.json, given.figure)
        return
    COMMON.update(data=given.data, model=given.model)
    stop = Stop()

    def end() -> None:
        stop.wanted = True

    if given.seconds < math.inf:
        timer = threading.Timer(given.seconds, end)
        timer.daemon = True
        timer.start()
    with stop.on_interrupt():
        study(given, stop)


if __name__ == "__main__":
    main()
