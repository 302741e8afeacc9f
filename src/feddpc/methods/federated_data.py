"""What there is before round 1: the data, who holds what, what the server keeps, what every client is given once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.dataset import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.rng import generator

Ids = NDArray[np.int64]
#: Sends every client a question, with some tensors for each client, and returns the answers of all clients.
Ask = Callable[[str, Callable[[int], dict[str, Tensor]]], dict[int, dict[str, Tensor]]]


@runtime_checkable
class LearnsByAsking(Protocol):
    """A method whose ``learn`` also works without the clients' samples: clients answer questions about them."""

    def learn_by_asking(self, ask: Ask, world: FederatedData, sizes: Ids) -> dict[str, Tensor]:
        """Return what ``learn`` would; ``world`` is the server's, without samples, ``sizes`` counts the clients'."""

    def answer(self, question: str, client: int, world: FederatedData, asked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the answer of one client; ``world`` has samples of this client only."""


def ask_locally(method: LearnsByAsking, world: FederatedData) -> Ask:
    """Return how the simulator asks: every client's answer is computed here."""
    return lambda question, asked: {c: method.answer(question, c, world, asked(c)) for c in range(len(world.partition))}


def require_asking(method: object, name: str) -> LearnsByAsking:
    """Return ``method`` if it can learn by asking clients, or refuse it."""
    if isinstance(method, LearnsByAsking):
        return method
    raise BadInputError(
        f"{name} learns from all clients' data before round 1, but does not say how to ask clients for it: give it the "
        "methods learn_by_asking and answer, or simulate it"
    )


@dataclass(frozen=True)
class FederatedData:
    """A federation before its first round, as a data-side method finds it and changes it.

    ``reserved_ids`` are training samples that were kept from all clients before the data were partitioned; they are
    class-balanced and in random order within each class. ``one_time_payload`` is what every client receives once, at
    first contact; a method finds it in ``ctx.broadcast``. ``down_once`` and ``up_once`` count further numbers that each
    client receives or sends once. ``disclosed`` says what left the clients before training.
    """

    data: Dataset
    partition: Partition
    seed: int
    client_lr: float
    batch_size: int
    device: torch.device
    reserved_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    one_time_payload: Mapping[str, Tensor] = field(default_factory=dict)
    down_once: float = 0
    up_once: float = 0
    disclosed: Mapping[str, float | int | str] = field(default_factory=dict)

    def rng(self, purpose: str, *keys: int) -> np.random.Generator:
        """Return the stream of random numbers for one purpose."""
        return generator(self.seed, purpose, *keys)

    def counts(self) -> Ids:
        """Return how many samples of each class each client holds, ``[clients, classes]``."""
        return self.partition.counts(self.data.y_train, self.data.classes)

    def assign(self, more: Sequence[Ids]) -> FederatedData:
        """Return these data with further training samples for the clients, one list per client."""
        lists = [np.concatenate([mine, new]) for mine, new in zip(self.partition, more, strict=True)]
        return replace(self, partition=Partition.from_lists(lists))

    def with_samples(self, x: NDArray[Any], y: Ids, owner: Ids) -> FederatedData:
        """Return these data with new samples ``x``, ``y`` in the training set, sample i held by client ``owner[i]``."""
        if not len(x):
            return self
        first = len(self.data.y_train)
        data = replace(
            self.data,
            x_train=np.concatenate([self.data.x_train, x.astype(self.data.x_train.dtype)]),
            y_train=np.concatenate([self.data.y_train, y.astype(np.int64)]),
        )
        ids = np.arange(first, first + len(y))
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(len(self.partition) + 1))
        mine = [ids[order[a:b]] for a, b in itertools.pairwise(bounds)]
        return replace(self, data=data).assign(mine)


def reserved_each(share: float, data: Dataset) -> int:
    """Return how many samples of every class make up ``share`` of the training set."""
    data.require_classes(f"reserve = {share}", "leave it out, and choose a method that needs no samples at the server")
    each = int(share * len(data.y_train) / data.classes)
    if each < 1:
        raise BadInputError(
            f"reserve = {share} of {len(data.y_train)} samples is less than one of each of the {data.classes} classes: "
            f"take at least {data.classes / len(data.y_train):.4g}"
        )
    return each


def reserved(share: float, data: Dataset, seed: int) -> Ids:
    """Draw the samples that the server keeps before the data are partitioned: the same number of every class."""
    if share == 0:
        return np.zeros(0, np.int64)
    each = reserved_each(share, data)
    rng = generator(seed, "reserve")
    kept = []
    for c in range(data.classes):
        mine = np.flatnonzero(data.y_train == c)
        if len(mine) <= each:
            raise BadInputError(
                f"reserve = {share} takes {each} samples of every class, but class {c} has only {len(mine)}: "
                "nothing would be left to the clients; lower it"
            )
        kept.append(rng.permutation(mine)[:each])
    return np.concatenate(kept)
