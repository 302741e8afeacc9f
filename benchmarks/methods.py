"""A round of every method against one of FedAvg in the same engine, turn by turn, and what its gradients would suggest.

CIFAR-10's shapes (random bytes), LeNet5, 10 of 100 clients, batch 256, alpha 0.6, without evaluation. ``gradients``
counts gradient evaluations against FedAvg's, batch for batch; a forward pass without a backward one counts as a third.
``over`` is the time beyond what they suggest, and should stay below 1.3.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import torch

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.bench.workloads import WORKLOADS
from feddpc.build import build
from feddpc.method_changes import for_method
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.runs.engine_choice import ENGINES

VARIANTS = {name: {} for name in methods.names()} | {
    "scaffold I": {"option": "I"},
    "fedga fresh": {"variant": "fresh"},
    "feddpc client": {"form": "client"},
    "fedspeed paper": {"server": "paper"},
    "faug": {"gan_steps": 20},
    "gmm": {"em_rounds": 1},
}


class Runner:
    """One method, ready to make rounds."""

    def __init__(self, setting, method, engine) -> None:
        setting = for_method(setting, method)
        self.method, self.engine = method, engine
        self.federation = dataclasses.replace(setting, evaluates=False)
        self.progress = RunState.begin(method, setting.w0, len(self.federation.population))
        self.device = setting.w0.device

    def __call__(self) -> float:
        return timed(lambda: run_round(self.federation, self.method, self.engine, self.progress), self.device)[0]

    def work(self) -> float:
        """Gradient evaluations of a batch, in all; a forward pass is a third of one."""
        meter = self.progress.meter
        if self.method.name != "fedbr":
            return meter.gradients + (meter.passes - meter.gradients) / 3
        # The pseudo-samples go along in every gradient, and once more forward; the projector is not counted.
        mean_batch = (
            self.federation.planner.partition.sizes.sum()
            / self.federation.planner.steps(self.federation.planner.partition.sizes).sum()
        )
        return meter.gradients * (1 + 4 / 3 * self.method.pseudo / mean_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="loop", choices=list(ENGINES))
    parser.add_argument("--methods", default=",".join(VARIANTS))
    args = parser.parse_args()
    made = {n: methods.create(n.split()[0], **VARIANTS[n]) for n in args.methods.split(",")}
    workload = WORKLOADS["cifar10"]
    config, data = workload.config(device=args.device), workload.data()
    settings = {r: build(dataclasses.replace(config, reserve=r), data=data) for r in {m.reserve for m in made.values()}}
    print(f"torch {torch.__version__}, {config.device}, engine {args.engine}, {data.name}, {args.rounds} rounds each")
    print(f"{'method':16}{'ms':>9}{'fedavg ms':>11}{'ratio':>8}{'gradients':>11}{'over':>7}")
    for name, method in made.items():
        engine = ENGINES[args.engine]()
        setting = settings[method.reserve]
        pair = [Runner(setting, methods.create("fedavg"), engine), Runner(setting, method, engine)]
        for runner in pair:
            runner()  # warm up; a survey before round 1 is not counted
            runner.progress.meter = type(runner.progress.meter)()
        turns = [[runner() for runner in pair] for _ in range(args.rounds)]
        plain, own = (statistics.median(t) for t in zip(*turns, strict=True))
        ratio = statistics.median(b / a for a, b in turns)
        work = pair[1].work() / pair[0].work()
        print(f"{name:16}{own * 1e3:9.1f}{plain * 1e3:11.1f}{ratio:8.2f}{work:11.2f}{ratio / work:7.2f}", flush=True)


if __name__ == "__main__":
    main()
