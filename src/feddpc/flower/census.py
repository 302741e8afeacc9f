"""What a server knows about clients whose data are elsewhere, in the forms that the round loop works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.config import Config
from feddpc.data.batches import BatchPlan, Planner
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.methods.base import ClientContext, Method, State
from feddpc.privacy.config import make_mechanism
from feddpc.robust.config import defense_of, faults_of
from feddpc.round import sampling
from feddpc.round.federation import Federation
from feddpc.tasks.base import Batch, Rows, Task

Ints = NDArray[np.int64]


class Census(Planner):
    """Plans without batches: how many samples clients have and how many steps they make, all that a server needs."""

    @classmethod
    def of(cls, sizes: Ints, batch_size: int, epochs: int, seed: int) -> Census:
        """Return the census of clients with ``sizes`` samples, whose numbers nobody here knows."""
        nothing = np.broadcast_to(np.int64(0), int(sizes.sum()))
        return cls(Partition.from_sizes(nothing, sizes), batch_size, epochs, seed)

    def plan(self, round: int, clients: Ints) -> BatchPlan:
        """Return sizes and steps."""
        sizes = self.partition.sizes[clients]
        steps = self.steps(sizes)
        none = np.zeros((len(clients), 0), np.int64)
        return BatchPlan(clients, sizes, none[..., None], none, steps, ())

    def sweep(self, clients: Ints) -> BatchPlan:
        """Return whom to ask."""
        return self.plan(0, clients)


class Elsewhere(Task):
    """The task of clients on other machines: it has a size, and gradients that are only good for their shapes."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d

    def fetch(self, rows: Rows) -> Batch:
        """There are no samples here."""
        raise BadInputError("the samples are with the clients")

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Nothing is lost on no samples."""
        return y.sum() * 0

    def full_gradient(self, y: Tensor, data: Iterable[Rows]) -> Tensor:
        """No samples, no slope."""
        return torch.zeros_like(y)


class Served:
    """A method as its server sees it: what clients remember is their own business, as is what they do not report."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    @property
    def probes(self) -> bool:
        """Whether there is an exchange before training."""
        return self.method.probes and self.method.reports

    def client_state_from_probe(self, answers: State) -> State:
        """Nothing but that the answer to the survey, round 0, counted."""
        m = len(next(iter(answers.values())))
        zero = torch.zeros(m, dtype=torch.int64)
        return {"node": zero, "accepted": zero}


def federation_of(config: Config, sizes: Ints, d: int, secret: int | None = None) -> Federation:
    """Return what the round loop must know of clients with ``sizes`` samples and a model of ``d`` parameters.

    Clients know the experiment's seed. With a ``secret`` one, and differential privacy, they foresee neither who takes
    part nor the noise, which would else hide nothing from them.
    """
    assert config.batch_size is not None
    privacy = make_mechanism(config)
    seed = config.seed
    if privacy is not None and secret is not None:
        privacy, seed = dataclasses.replace(privacy, reproducible=False), secret
    return Federation(
        task=Elsewhere(d),
        planner=Census.of(sizes, config.batch_size, config.epochs, config.seed),
        sampler=sampling.make(
            config.participation,
            population=config.clients,
            cohort=config.cohort,
            seed=seed,
            dropout=config.dropout,
            sizes=sizes,
            **config.participation_options,
        ),
        client_lr=config.lr,
        server_lr=config.lr if config.server_lr is None else config.server_lr,
        lr_decay=config.lr_decay,
        weighting=config.weighting,
        privacy=privacy,
        faults=faults_of(config, config.clients),
        defense=defense_of(config),
    )


def expected(method: Method, w: Tensor, down: State) -> State:
    """Return what one client's upload looks like: names, shapes and types, not values."""
    probed = method.probe(Elsewhere(w.numel()), w, []) if method.probes else {}
    here = ClientContext(w, down, method.init_client(w) | probed, 1.0, torch.ones((), dtype=w.dtype))
    up, _ = method.finish(method.start(here), here)
    return up
