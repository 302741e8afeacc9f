"""GMM: clients fill up the classes they lack with samples from mixtures that all of them fitted together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from feddpc.methods._em import Box, Mixture, fit
from feddpc.methods.base import Costs, Method, State
from feddpc.methods.federated_data import FederatedData


@dataclass(frozen=True, kw_only=True)
class GMM(Method):
    """Fit a Gaussian mixture to each class together; fill up missing classes from it.

    Before round 1, for each class, the clients that hold it fit M Gaussians with diagonal covariances to its pixels x:

    Client j:  sends n_k = sum gamma_k(x), s_k = sum gamma_k(x) x, q_k = sum gamma_k(x) x^2 over its samples   E times
    Server:    weight_k = n_k / sum n,  mean_k = s_k / n_k,  variance_k = max(q_k / n_k - mean_k^2, floor)     E times
    Client j:  makes samples until it has n_target of each class; then plain local SGD on real and made samples
    Server:    w_t = w_{t-1} - eta_g mean_S D_j                                                                (FedAvg)

    | symbol   | name       | default | domain                                                                |
    |----------|------------|---------|-----------------------------------------------------------------------|
    | M        | components | 3       | components >= 1; 1: mean and variance of the class                    |
    | E        | em_rounds  | 10      | em_rounds >= 1                                                        |
    |          | floor      | 1e-3    | 1e-9 <= floor <= 1; least variance, for data scaled to [0, 1]         |
    |          | min_count  | 5       | min_count >= 0; components of fewer samples are suppressed            |
    | n_target | target     | mean    | target >= 0, or mean: the client's samples over the number of classes |

    target 0 is FedAvg. Float features are scaled to [0, 1] by their range, and samples clipped to it; images to 0..255.

    Departures: none known, see below. The server hands out no component of few samples, which would nearly show them
    (clients that hold the class saw it during EM), and a class that has no other is not filled up.

    Confidence: a reconstruction; of the paper only the idea could be confirmed, all else is this library's choice.

    >>> GMM().hyper()
    {'components': 3, 'em_rounds': 10, 'floor': 0.001, 'min_count': 5, 'target': 'mean'}
    """

    name: ClassVar[str] = "gmm"
    title: ClassVar[str] = "GMM"
    reference: ClassVar[str] = (
        "Nagaraju, Sen, Mohan, Handling Data Heterogeneity in Federated Learning with Global Data Distribution, 2023"
    )
    privacy: ClassVar[str] = (
        "Before round 1 a client sends, for each class it holds, count, sum and sum of squares of its samples, then of "
        "each component, em_rounds times; also the range of float features. This can bare its only sample of a class."
    )
    costs: ClassVar[Costs] = Costs(
        down="1 + mixtures once",
        up="1 + statistics once",
        client_state="synthetic data",
        server_state="mixtures",
        client_work="more samples",
        server_work="EM",
    )
    needs_only_sums: ClassVar[bool] = True

    components: int = 3
    em_rounds: int = 10
    floor: float = 1e-3
    min_count: int = 5
    target: int | Literal["mean"] = "mean"

    def __post_init__(self) -> None:
        for name, low in (("components", 1), ("em_rounds", 1), ("min_count", 0)):
            self.require(getattr(self, name) >= low, name, f"{name} >= {low}")
        self.require(1e-9 <= self.floor <= 1, "floor", "1e-9 <= floor <= 1")
        target_fits = self.target >= 0 if isinstance(self.target, int) else self.target == "mean"
        self.require(target_fits, "target", "target >= 0, or mean")

    def learn(self, world: FederatedData) -> State:
        """The mixtures of all classes, in the unit cube, and the box it stands for; suppressed components are zero."""
        if self.target == 0:
            return {}
        x = world.data.x_train.reshape(len(world.data.x_train), -1)
        image = Box(*np.outer([0.0, 255.0], np.ones(x.shape[1])))
        box = image if world.data.is_image else Box.around(x[mine] for mine in world.partition)
        order, owner = world.partition.order, np.repeat(np.arange(len(world.partition)), world.partition.sizes)
        of_class = [world.data.y_train[order] == r for r in range(world.data.classes)]
        how = (box, self.components, self.em_rounds, self.floor)
        fitted = [fit(x[order[of]], owner[of], *how, world.rng("gmm", r)) for r, of in enumerate(of_class)]
        kept = [mixture.without(self.min_count) for mixture in fitted]
        learned = {key: [getattr(mixture, key) for mixture in kept] for key in ("weights", "means", "variances")}
        learned |= {"counts": [mixture.counts for mixture in fitted], "box": [box.low, box.high]}
        return {key: torch.from_numpy(np.stack(value)) for key, value in learned.items()}

    def extend_data(self, world: FederatedData, learned: State) -> FederatedData:
        """Every client fills up its classes."""
        if self.target == 0:
            return world
        weights, means, variances, box = (learned[key].numpy() for key in ("weights", "means", "variances", "box"))
        counts, real, made = world.counts(), world.data.x_train, [world.data.x_train[:0]]
        goal = np.rint(counts.mean(1, keepdims=True)) if self.target == "mean" else self.target
        lacks = np.maximum(goal - counts, 0).astype(np.int64) * weights.any(1)
        for j, lack in enumerate(lacks):
            rng = world.rng("gmm samples", j)
            for r in np.flatnonzero(lack):
                x = Box(*box).outwards(Mixture(weights[r], means[r], variances[r]).draw(lack[r], rng))
                made.append((np.rint(x) if world.data.is_image else x).astype(real.dtype).reshape(-1, *real.shape[1:]))
        owner, y = (np.repeat(ids.ravel(), lacks.ravel()) for ids in np.indices(lacks.shape))
        sums = (2 * box.shape[1] + 1) * float((counts > 0).sum(1).mean())
        up = sums * (1 + self.components * self.em_rounds) + (0 if world.data.is_image else box.size)
        return replace(
            world.with_samples(np.concatenate(made), y, owner),
            kit={"mixture": torch.cat([torch.from_numpy(a).float().ravel() for a in (weights, means, variances, box)])},
            down_once=sums * self.components * self.em_rounds,
            up_once=up,
            disclosed={
                "numbers_sent_by_a_client": up,
                "synthetic_samples": len(y),
                "suppressed_components": int((weights == 0)[counts.any(0)].sum()),
            },
        )
