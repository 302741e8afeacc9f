"""What the drivers of other systems share: the work, in plain torch. Imports neither feddpc nor any peer.

Every driver runs FedAvg on the images, labels and index lists of one .npz file and writes the seconds of every round,
evaluation included, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BATCH, LR, COHORT = 256, 0.1, 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path, help="the .npz file")
    parser.add_argument("out", type=Path, help="where the seconds go")
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


class Work:
    """Images as floats in memory, and who holds what."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.x, self.x_test = (_floats(file[k]) for k in ("x_train", "x_test"))
            self.y, self.y_test = (torch.from_numpy(file[k].astype(np.int64)) for k in ("y_train", "y_test"))
            self.owned = [torch.from_numpy(mine) for mine in np.split(file["order"], file["starts"][1:-1])]

    def client(self, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples of one client."""
        return self.x[self.owned[j]], self.y[self.owned[j]]


@cache
def work() -> Work:
    """What the file named by PEERS_WORK holds, read once in each process."""
    return Work(Path(os.environ["PEERS_WORK"]))


def _floats(images: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255 - 0.5) / 0.5


def lenet5() -> nn.Sequential:
    """LeNet5, variant A of feddpc: 62,006 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """One epoch of SGD."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    for batch in torch.randperm(len(x)).split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()


@torch.no_grad()
def correct(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """How many are right."""
    return sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))


def report(path: Path, system: str, seconds: list[float], accuracy: list[float], **more: object) -> None:
    found = {"system": system, "torch": torch.__version__, "seconds": seconds, "accuracy": accuracy, **more}
    path.write_text(json.dumps(found))
