"""Batch plans: which samples each client of a cohort trains on at each local step, drawn in advance on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddpc.data.partition import Partition
from feddpc.rng import generator, torch_seed

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a cohort: client ``i`` trains on ``index[i, k, :count[i, k]]`` at step ``k < steps[i]``.

    Entries beyond ``count`` and ``steps`` are padding (index 0). With augmentation, ``draws[i, k, b]`` holds the
    vertical shift, the horizontal shift and the flip of a sample; with a transform, uniform numbers in [0, 1).
    ``noise`` holds one seed per client, for layers that draw random numbers.
    """

    clients: Ints  # [m]
    sizes: Ints  # [m] number of samples per client
    index: Ints  # [m, K, B]
    count: Ints  # [m, K]
    steps: Ints  # [m]
    noise: tuple[int, ...]
    draws: NDArray[Any] | None = None  # [m, K, B, 3] int16, or [m, K, B, u] float32

    def take(self, rows: Ints) -> BatchPlan:
        """Return the plan of the clients in these rows."""
        K = int(self.steps[rows].max(initial=0))
        return BatchPlan(
            clients=self.clients[rows],
            sizes=self.sizes[rows],
            index=self.index[rows, :K],
            count=self.count[rows, :K],
            steps=self.steps[rows],
            noise=tuple(self.noise[i] for i in rows),
            draws=None if self.draws is None else self.draws[rows, :K],
        )

    def first(self, steps: int) -> BatchPlan:
        """Return this plan with at most so many steps per client."""
        return replace(
            self,
            index=self.index[:, :steps],
            count=self.count[:, :steps],
            steps=np.minimum(self.steps, steps),
            draws=None if self.draws is None else self.draws[:, :steps],
        )

    def resting(self, rest: NDArray[np.bool_]) -> BatchPlan:
        """Return this plan with no steps for the clients that ``rest`` marks."""
        return replace(self, steps=np.where(rest, 0, self.steps), count=np.where(rest[:, None], 0, self.count))


@dataclass(frozen=True)
class Planner:
    """Builds the batch plans of one experiment, as a pure function of (seed, round, client)."""

    partition: Partition
    batch_size: int
    epochs: int
    seed: int
    shift: int = 0  # largest shift of a crop in pixels; 0 means no augmentation
    uniforms: int = 0  # random numbers per sample for a transform; 0 means none
    smallest: int = 1  # a last batch with fewer samples joins the one before it

    def plan(self, round: int, clients: Ints) -> BatchPlan:
        """Plan ``epochs`` shuffled passes over each client's samples; the last partial batch of a pass is kept."""
        passes = []
        for client in clients:
            own, rng = self.partition[int(client)], generator(self.seed, "batches", round, int(client))
            passes.append([own[rng.permutation(len(own))] for _ in range(self.epochs)])
        return self._pad(round, clients, passes)

    def steps(self, sizes: Ints) -> Ints:
        """Return the number of local steps per round of clients with ``sizes`` samples."""
        whole, rest = sizes // self.batch_size, sizes % self.batch_size
        apart: Ints = whole + ((rest >= self.smallest) | ((rest > 0) & (whole == 0)))
        return apart * self.epochs

    def sweep(self, clients: Ints) -> BatchPlan:
        """Plan one pass over each client's samples, unshuffled and unaugmented, for full gradients."""
        return self._pad(None, clients, [[self.partition[int(c)]] for c in clients])

    def _pad(self, round: int | None, clients: Ints, passes: list[list[Ints]]) -> BatchPlan:
        chunks = [[batch for order in orders for batch in self._batches(order)] for orders in passes]
        steps = np.array([len(c) for c in chunks], dtype=np.int64)
        K, B = max((len(c) for c in chunks), default=0), max((len(b) for c in chunks for b in c), default=0)
        index = np.zeros((len(clients), K, B), dtype=np.int64)
        count = np.zeros((len(clients), K), dtype=np.int64)
        for i, batches in enumerate(chunks):
            for k, batch in enumerate(batches):
                index[i, k, : len(batch)] = batch
                count[i, k] = len(batch)
        noise = tuple(torch_seed(self.seed, "noise", round or 0, int(c)) for c in clients)
        draws = None
        if round is not None and (self.shift or self.uniforms):
            draws = self._draws(round, clients, index.shape)
        sizes = np.array([len(orders[0]) for orders in passes], dtype=np.int64)
        return BatchPlan(clients, sizes, index, count, steps, noise, draws)

    def _batches(self, order: Ints) -> list[Ints]:
        starts = list(range(0, len(order), self.batch_size))
        if len(starts) > 1 and len(order) - starts[-1] < self.smallest:
            starts.pop()
        return [order[a:b] for a, b in zip(starts, [*starts[1:], len(order)], strict=True)]

    @property
    def draw_width(self) -> int:
        """How many random numbers there are per sample."""
        return self.uniforms or (3 if self.shift else 0)

    def _draws(self, round: int, clients: Ints, shape: tuple[int, ...]) -> NDArray[Any]:
        draws = np.zeros((*shape, self.draw_width), dtype=np.float32 if self.uniforms else np.int16)
        high = [2 * self.shift + 1, 2 * self.shift + 1, 2]
        for i, client in enumerate(clients):
            # One stream per client, read step by step, so that the draws do not depend on the padding of the cohort.
            rng = generator(self.seed, "transform" if self.uniforms else "augment", round, int(client))
            size = min(self.batch_size + self.smallest - 1, len(self.partition[int(client)]))
            wanted = (shape[1], size, self.draw_width)
            if self.uniforms:
                draws[i, :, :size] = rng.random(wanted, dtype=np.float32)
            else:
                draws[i, :, :size] = rng.integers(high, size=wanted, dtype=np.int16)
        return draws
