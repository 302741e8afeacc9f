"""The clients as the server knows them: who takes part in a round, with which weights, rates and numbers of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc import sampling
from feddpc.config import Config
from feddpc.methods.base import Cohort, Method, State
from feddpc.participants import Draw, Sampler
from feddpc.policies import client_optimizer
from feddpc.robust.faults import Faults
from feddpc.schedules import make_schedule

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Population:
    """All clients of an experiment, on this machine or on others; ``config`` is resolved."""

    def __init__(self, config: Config, sizes: Ints, sampler: Sampler, faults: Faults | None = None) -> None:
        self.config, self.sizes, self.sampler, self.faults = config, sizes, sampler, faults
        self._by_samples = config.weighting == "samples"
        self._factor = make_schedule(config.lr_schedule, config.lr_schedule_options, config.rounds)
        self.optimizer = client_optimizer(config)  #: how clients make local steps
        self.momentum, self.plain_steps = self.optimizer.momentum_of_clients, not self.optimizer.features
        self._sizes_on: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def draw(self, t: int) -> Draw:
        """Return who is invited to round ``t`` and who of them answers; simulated stragglers do not."""
        draw = self.sampler.draw(t)
        if self.faults is None:
            return draw
        return Draw(draw.invited, draw.answered[~self.faults.late(t, draw.answered)])

    def stragglers(self, t: int, draw: Draw) -> dict[str, list[int]]:
        """Return the simulated stragglers of round ``t``, in the form in which a record lists faults."""
        if self.faults is None:
            return {}
        late = draw.dropped[self.faults.late(t, draw.dropped)].tolist()
        return {"straggler": late} if late else {}

    def rates(self, t: int) -> tuple[float, float]:
        """Return the local and the server rate of round ``t``; they change together, so that their ratio stays."""
        config = self.config
        assert config.server_lr is not None
        factor = config.lr_decay ** (t - 1) if config.lr_schedule == "constant" else self._factor(t)
        return config.lr * factor, config.server_lr * factor

    @property
    def rates_change(self) -> bool:
        """Whether the rates differ between rounds."""
        return self.config.lr_decay != 1 or self.config.lr_schedule != "constant"

    def weights(self, sizes: Ints) -> NDArray[np.float64]:
        """Return the weights of a cohort's clients with ``sizes`` samples; they add up to one."""
        return sizes / sizes.sum() if self._by_samples else np.full(len(sizes), 1 / max(len(sizes), 1))

    def shares(self, ids: Ints) -> Tensor:
        """Return the shares of clients ``ids`` in a mean over all clients."""
        if self._by_samples:
            return torch.from_numpy(self.sizes[ids] / self.sizes.sum())
        return torch.full((len(ids),), 1 / len(self), dtype=torch.float64)

    def sizes_on(self, device: torch.device) -> Tensor | None:
        """Return the samples per client on ``device``; None where all clients count alike."""
        if not self._by_samples:
            return None
        if device not in self._sizes_on:
            self._sizes_on[device] = torch.from_numpy(self.sizes).to(device)
        return self._sizes_on[device]

    def cohort(
        self, method: Method, t: int, ids: Ints, steps: Ints, slots: State, device: torch.device
    ) -> tuple[Cohort, Mask | None]:
        """Return what the server knows about clients ``ids`` in round ``t``, and which of them train, if not all."""
        client_lr, server_lr = self.rates(t)
        sizes = self.sizes[ids]
        cohort = Cohort(
            round=t,
            clients=placed(ids, device),
            population=len(self),
            weights=placed(self.weights(sizes), device),
            sizes=self.sizes_on(device),
            steps=placed(steps.astype(np.float64), device),
            client_lr=client_lr,
            server_lr=server_lr,
            slots=slots,
            samples=placed(sizes, device) if self._by_samples else None,
            seed=self.config.seed,
            momentum=self.momentum,
        )
        training = method.train_mask(cohort)
        if training is None:
            return cohort, None
        return replace(cohort, steps=placed(np.where(training, steps, 0).astype(np.float64), device)), training


def make_sampler(config: Config, sizes: Ints, seed: int | None = None) -> Sampler:
    """Return what draws the participants of a round, with another ``seed`` than the configuration's if there is one."""
    return sampling.make(
        config.participation,
        population=len(sizes),
        cohort=config.cohort,
        seed=config.seed if seed is None else seed,
        dropout=config.dropout,
        sizes=sizes,
        **config.participation_options,
    )


def placed(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return host values as a tensor on ``device``, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
