"""Workloads with random data in the shapes and sizes of known data sets: the same work.

The paper's three, the CNN of the first paper on federated averaging, and Shakespeare's plays.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddpc.config import Config
from feddpc.data import Dataset


@dataclass(frozen=True)
class Workload:
    """10 of 100 clients, one epoch; labels as even as those of the data set it stands for."""

    name: str
    title: str
    model: str
    classes: int
    size: int  #: pixels a side
    train: int
    test: int = 10_000
    alpha: float | None = 0.6  #: None: every client has as many samples as the others, of all classes
    channels: int = 3
    batch: int = 256

    def quick(self) -> Workload:
        """Return a tenth of it, to see that everything works."""
        return dataclasses.replace(
            self, title=f"{self.title}, a tenth of it", train=self.train // 10, test=self.test // 10
        )

    def data(self) -> Dataset:
        """Return random images, alike on every machine.

        >>> WORKLOADS["cifar10"].quick().data()
        Dataset('random bytes', 10 classes, sample 32x32x3 uint8, 5000 train, 1000 test)
        """
        rng = np.random.default_rng(0)
        n = self.train + self.test
        shape = (n, self.size, self.size, self.channels)
        x = np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape)
        y = np.arange(n) % self.classes
        k = self.train
        return Dataset.from_arrays(x[:k], y[:k], x[k:], y[k:], name="random bytes", classes=self.classes)

    def asdict(self) -> dict[str, Any]:
        """Return what :func:`read` makes the same workload of."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}

    def config(self, **values: object) -> Config:
        """Return the configuration of a run on it."""
        skew = {"partition": "iid"} if self.alpha is None else {"alpha": self.alpha}
        return Config.read({"model": self.model, "batch_size": self.batch, **skew, **values})


@dataclass(frozen=True)
class TextWorkload(Workload):
    """10 of 100 clients with 100 sequences each, one epoch: the next token at every position.

    ``classes`` is the vocabulary and ``size`` the length of a sequence.
    """

    test: int = 2_500
    alpha: float | None = None
    batch: int = 16

    def data(self) -> Dataset:
        """Return random tokens, alike on every machine; the targets are the tokens shifted by one.

        >>> WORKLOADS["text-lstm"].quick().data()
        Dataset('random tokens', target tokens, 65 tokens, sample 80 int64, 1000 train, 250 test)
        """
        rng = np.random.default_rng(0)
        tokens = rng.integers(self.classes, size=(self.train + self.test, self.size + 1))
        x, y, k = tokens[:, :-1], tokens[:, 1:], self.train
        arrays = x[:k], y[:k], x[k:], y[k:]
        return Dataset.from_arrays(*arrays, name="random tokens", classes=self.classes, target="tokens")


def read(values: dict[str, Any]) -> Workload:
    """Return the workload that `Workload.asdict` has described.

    >>> all(read(work.asdict()) == work for work in WORKLOADS.values())
    True
    """
    kinds = {kind.__name__: kind for kind in (Workload, TextWorkload)}
    return kinds[values["kind"]](**{key: value for key, value in values.items() if key != "kind"})


WORKLOADS = {
    w.name: w
    for w in (
        Workload("cifar10", "CIFAR-10's shapes, LeNet5", "lenet5", 10, 32, 50_000),
        Workload("cifar100", "CIFAR-100's shapes, ResNet18", "resnet18", 100, 32, 50_000),
        Workload("tiny", "Tiny ImageNet's shapes, ResNet18", "resnet18", 200, 64, 100_000),
        Workload(
            "mnist", "MNIST's shapes, McMahan's CNN", "mcmahan-cnn", 10, 28, 50_000, alpha=None, channels=1, batch=64
        ),
        TextWorkload("text-transformer", "Shakespeare's shapes, transformer", "transformer", 65, 80, 10_000),
        TextWorkload("text-lstm", "Shakespeare's shapes, LSTM", "lstm", 65, 80, 10_000),
    )
}
