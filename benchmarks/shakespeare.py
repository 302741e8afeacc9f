"""Does what the paper says about FedDPC hold where clients are natural and the model is recurrent?

    python benchmarks/shakespeare.py --out runs/shakespeare        # tune, then three seeds; --plan prints the runs

Next character on Shakespeare, one client per speaking role, a two-layer LSTM. Every method gets the same budget: six
settings of one seed, chosen on a tenth of the training sequences that nobody trains on. The best setting of each method
then runs over three seeds, without looking at the test set before. A run is never made twice, so the command may be
stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from feddpc.bench import machine
from feddpc.config import Config
from feddpc.study.folder import RunResult
from feddpc.study.runner import run_study
from feddpc.study.spec import RunSpec

RATES = (0.3, 1.0, 3.0)
#: Per method, the second thing that is tuned, with two values.
SECOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedavg": ({"step": 1.0}, {"step": 1.5}),
    "fedprox": ({"hyper": {"mu": 0.001}}, {"hyper": {"mu": 0.01}}),
    "scaffold": ({"step": 1.0}, {"step": 1.5}),
    "fedcm": ({"hyper": {"alpha": 0.1}}, {"hyper": {"alpha": 0.5}}),
    "fedadam": ({"server_lr": 0.003}, {"server_lr": 0.01}),
    "feddpc": ({"hyper": {"lam": 0.0}}, {"hyper": {"lam": 1.0}}),
}
COMMON: dict[str, Any] = {
    "data": "shakespeare", "model": "lstm", "cohort": 10, "batch_size": 32, "precision": "float32",
}  # fmt: skip


def config(method: str, lr: float, second: dict[str, Any], **more: Any) -> Config:
    """Return one setting of a method; ``step`` is the server's rate as a multiple of the clients'."""
    values = {**COMMON, "method": method, "lr": lr, **second, **more}
    step = values.pop("step", None)
    if step is not None:
        values["server_lr"] = step * lr
    return Config.read(values)


def grid(rounds: int) -> dict[str, list[RunSpec]]:
    """Return the settings that are tried per method."""
    return {
        method: [
            RunSpec(
                config(method, lr, second, rounds=rounds, validation=0.1, evaluate_every=5), f"{method} {lr} {second}"
            )
            for lr, second in itertools.product(RATES, values)
        ]
        for method, values in SECOND.items()
    }


def chosen(results: list[RunResult]) -> RunResult | None:
    """Return the setting with the best accuracy on held-out sequences; none that diverged."""
    able = [result for result in results if result.status == "done" and result.validation is not None]
    return max(able, key=lambda result: result.validation or 0.0, default=None)


def main() -> None:
    """Tune, run, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--grid-rounds", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(SECOND))
    parser.add_argument("--data", default=COMMON["data"], help="another data set, to try the script")
    parser.add_argument("--model", default=COMMON["model"])
    parser.add_argument("--plan", action="store_true", help="print the runs and end")
    parser.add_argument("--json", type=Path, help="where the summary goes")
    given = parser.parse_args()
    COMMON.update(data=given.data, model=given.model)
    wanted = given.methods.split(",")
    tried = {method: specs for method, specs in grid(given.grid_rounds).items() if method in wanted}
    if given.plan:
        print("\n".join(spec.label for specs in tried.values() for spec in specs))
        return
    everything = [spec for specs in tried.values() for spec in specs]
    results = {spec.key: result for spec, result in zip(everything, run_study(everything, given.out), strict=True)}
    found: dict[str, Any] = {}
    finals: dict[str, list[RunSpec]] = {}
    for method, specs in tried.items():
        own = [results[spec.key] for spec in specs]
        best = chosen(own)
        found[method] = {
            "tried": [
                {
                    "setting": r.spec.label,
                    "status": r.status,
                    "validation": r.validation,
                    "s/round": r.seconds_per_round,
                }
                for r in own
            ],
            "chosen": best and best.spec.label,
        }
        if best is not None:
            base = best.spec.config.asdict() | {"rounds": given.rounds, "validation": 0.0}
            finals[method] = [RunSpec(Config.read(base | {"seed": s}), method) for s in range(given.seeds)]
    write(given, found)
    for seed in range(given.seeds):
        present = {method: specs[seed] for method, specs in finals.items()}
        for method, result in zip(present, run_study(list(present.values()), given.out), strict=True):
            curve = [record.get("test_accuracy") for record in result.records()]
            entry = {"seed": seed, "status": result.status, "final": result.final, "best": result.best}
            found[method].setdefault("runs", []).append(entry | {"curve": [v for v in curve if v is not None]})
        write(given, found)
    for method in finals:
        ends = [run["final"] for run in found[method]["runs"] if run["final"] is not None]
        print(f"{method:10s} {found[method]['chosen']:45s} {[round(100 * v, 2) for v in ends]}")


def write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what is known so far."""
    about = {
        "machine": machine.describe("cuda" if torch.cuda.is_available() else "cpu"),
        "grid rounds": given.grid_rounds,
        "rounds": given.rounds,
    }
    path = given.json or given.out / "summary.json"
    path.write_text(json.dumps({**about, "common": COMMON, "methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
