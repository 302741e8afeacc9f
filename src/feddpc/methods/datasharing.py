"""Data sharing (Zhao et al.): all clients get a small balanced set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods.base import Costs, Method, State
from feddpc.methods.federated_data import FederatedData, Ids, reserved_each
from feddpc.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class DataSharing(Method):
    """Hand a small balanced set to all clients, and start from a model trained on it.

    Server:    keeps G, beta n training samples, the same number of every class, out of the clients' hands before data
               are partitioned; trains w_0 on G for some epochs; sends a random share alpha of G to each client once
    Client j:  plain local SGD on its own samples and its share of G
    Server:    w_t = w_{t-1} - eta_g mean_S D_j                                          (FedAvg)

    | symbol | name     | default | domain              |
    |--------|----------|---------|---------------------|
    | beta   | beta     | 0.05    | 0 < beta < 1        |
    | alpha  | fraction | 0.5     | 0 <= fraction <= 1  |
    |        | warmup   | 5       | epochs, warmup >= 0 |

    fraction = 0 and warmup = 0 is FedAvg on the clients' own data. In a comparison all methods leave G out, so that
    all see the same clients.

    Departures: beta is a share of the whole training set, G included; the warm-up uses the clients' rate and batch size
    (the paper does not say which); uniform weights unless the experiment weights by samples (the paper does, the share
    included).

    Confidence: the paper through summaries; no public code.

    >>> DataSharing(beta=0.1).reserve
    0.1
    """

    name: ClassVar[str] = "datasharing"
    title: ClassVar[str] = "Data sharing"
    reference: ClassVar[str] = "Zhao et al., Federated learning with non-IID data, 2018, arXiv:1806.00582"
    privacy: ClassVar[str] = (
        "The server holds raw samples of every class and sends them to all clients; the clients they come from give "
        "them away. The clients' own samples stay where they are."
    )
    targets: ClassVar[tuple[str, ...]] = ("classes",)
    costs: ClassVar[Costs] = Costs(
        down="1 + samples once",
        client_state="shared samples",
        server_state="samples",
        client_work="more samples",
        server_work="warm-up",
    )
    needs_only_sums: ClassVar[bool] = True

    beta: float = 0.05
    fraction: float = 0.5
    warmup: int = 5

    def __post_init__(self) -> None:
        self.require(0 < self.beta < 1, "beta", "0 < beta < 1, a share of the training set")
        self.require(0 <= self.fraction <= 1, "fraction", "0 <= fraction <= 1, a share of the server's set")
        self.require(self.warmup >= 0, "warmup", "warmup >= 0 epochs")

    @property
    def reserve(self) -> float:
        """What the server keeps."""
        return self.beta

    def extend_data(self, world: FederatedData, learned: State) -> FederatedData:
        """Give every client its random share of G."""
        mine = self._kept(world)
        count = round(self.fraction * len(mine))
        shares = [np.sort(world.rng("share", j).permutation(mine)[:count]) for j in range(len(world.partition))]
        return replace(
            world.assign(shares),
            down_once=count * int(np.prod(world.data.sample_shape)),
            disclosed={"samples_at_the_server": len(mine), "samples_sent_to_each_client": count},
        )

    def initial(self, task: Task, w: Tensor, world: FederatedData) -> Tensor:
        """Warm up: plain SGD on G."""
        mine = self._kept(world)
        for epoch in range(self.warmup):
            order = world.rng("warm-up", epoch).permutation(mine)
            for start in range(0, len(order), world.batch_size):
                batch = task.samples(order[start : start + world.batch_size])
                _, g = task.value_and_grad(lambda at, batch=batch: task.loss(at, batch), w)  # type: ignore[misc]
                w = w - world.client_lr * g
        return w

    def _kept(self, world: FederatedData) -> Ids:
        """The samples of G: from each class of the reserve, its first ones."""
        labels = world.data.y_train[world.reserved_ids]
        each = reserved_each(self.beta, world.data)
        kept = [world.reserved_ids[labels == c][:each] for c in range(world.data.classes)]
        if any(len(k) < each for k in kept):
            raise BadInputError(
                f"{self.name}: beta = {self.beta} needs {each} samples of every class, but the server was left with "
                f"{len(world.reserved_ids)} in all: raise reserve, or lower beta"
            )
        return np.concatenate(kept)
