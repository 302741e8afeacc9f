"""A whole round on a CPU or GPU, engines against a plain eager loop in the same process, turn by turn.

CIFAR-10's shapes, LeNet5, 10 of 100 clients, batch 256, alpha 0.6, with evaluation. The data are random bytes unless
CIFAR-10 is in the cache; arithmetic does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from feddpc import methods, models
from feddpc.data import Dataset, load
from feddpc.engine.loop import Loop
from feddpc.engine.rounds import Progress, advance
from feddpc.engine.stacked import Stacked
from feddpc.errors import DataError
from feddpc.run.config import Config
from feddpc.run.experiment import choose_engine, prepare


def cifar_like() -> Dataset:
    try:
        return load("cifar10")
    except DataError:
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 256, (60_000, 32, 32, 3), dtype=np.uint8), np.tile(np.arange(10), 6000)
        return Dataset.from_arrays(x[:50_000], y[:50_000], x[50_000:], y[50_000:], name="random bytes", classes=10)


class Eager:
    """FedAvg as researchers write it: float tensors in memory, one module, torch's SGD, state dictionaries."""

    def __init__(self, setting) -> None:
        self.setting, self.device = setting, setting.w0.device
        self.x = (setting.task.x.float() / 255 - 0.5) / 0.5
        self.x_test = setting.task.x_test.contiguous()
        self.net = models.LeNet5().to(self.device)
        self.net.load_state_dict(setting.flat.state_dict(setting.w0))
        self.state = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.round = 0

    def __call__(self) -> None:
        self.round += 1
        draw = self.setting.federation.sampler.draw(self.round)
        locals_ = []
        for client in draw.answered:
            own = torch.from_numpy(self.setting.partition[int(client)].copy()).to(self.device)
            self.net.load_state_dict(self.state)
            optimiser = torch.optim.SGD(self.net.parameters(), lr=0.1)
            order = own[torch.randperm(len(own), device=self.device)]
            for batch in torch.split(order, 256):
                optimiser.zero_grad()
                F.cross_entropy(self.net(self.x[batch]), self.setting.task.y[batch]).backward()
                optimiser.step()
            locals_.append({k: v.detach().clone() for k, v in self.net.state_dict().items()})
        self.state = {k: torch.stack([s[k] for s in locals_]).mean(0) for k in self.state}
        self.net.load_state_dict(self.state)
        self.net.eval()
        with torch.no_grad():
            x, y = self.x_test, self.setting.task.y_test
            correct = sum((self.net(a).argmax(1) == b).sum() for a, b in zip(x.split(1000), y.split(1000), strict=True))
        self.net.train()
        float(correct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="feddpc")
    args = parser.parse_args()
    data = cifar_like()
    setting = prepare(Config.read({"model": "lenet5", "alpha": 0.6, "device": args.device}), data=data)
    method = methods.create(args.method)
    runners = {"eager loop": Eager(setting)}
    for engine in (Loop(), Stacked()):
        progress = Progress.begin(method, setting.w0, 100)
        runners[engine.name] = lambda e=engine, p=progress: advance(setting.federation, method, e, p)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(args.rounds + 2):
        for name, run in runners.items():
            began = time.perf_counter()
            run()
            if turn >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - began)
    chosen, _ = choose_engine("auto", setting, method)
    print(f"{data.name}, LeNet5, 10 of 100 clients, batch 256, alpha 0.6, with evaluation; {args.method}")
    print(f"{setting.config.device}, {torch.get_num_threads()} threads, torch {torch.__version__}; auto: {chosen.name}")
    base = statistics.median(times["eager loop"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:12} {1e3 * median:8.1f} ms a round   {base / median:5.2f} times the eager loop's speed")


if __name__ == "__main__":
    main()
