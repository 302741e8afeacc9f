"""FAug: clients fill up the classes they lack with a generator that the server trained on samples they sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from feddpc.methods import _gan
from feddpc.methods.base import Costs, Method, State
from feddpc.methods.federated_data import Ask, FederatedData, Ids, ask_locally

PROBED = 64  #: samples of a class, made and real, whose distances tell the generator's diversity


@dataclass(frozen=True, kw_only=True)
class FAug(Method):
    """Train a generator on a few samples of rare classes; fill up what clients lack.

    Before round 1; client j holds n_jr samples of class r, n_j in all, of R classes:

    Client j:  a_j = ceil(b n_j / R), at most max_r n_jr;   targets T_j = {r: n_jr < a_j}
               sends up to s of its samples of each class in T_j that it holds, and of q other classes to hide these;
               nothing if T_j is empty
    Server:    trains a conditional GAN on all samples sent, every class as often; sends the generator G to all
    Client j:  makes a_j - n_jr samples of each class in T_j, unless no client sent any;
               then plain local SGD on real and made samples
    Server:    w_t = w_{t-1} - eta_g mean_S D_j                                                                (FedAvg)

    | symbol | name      | default | domain                                                                           |
    |--------|-----------|---------|----------------------------------------------------------------------------------|
    | s      | seeds     | 5       | seeds >= 1, at most the largest number of samples of one class at one client     |
    | q      | redundant | 1       | redundant >= 0                                                                   |
    | b      | balance   | 1       | balance >= 0; 0: FedAvg, 1: up to the mean over classes, R: up to the largest    |
    |        | gan_steps | 1000    | gan_steps >= 1                                                                   |

    No targets anywhere: FedAvg. The generator belongs to the run and is not trained again when it is resumed.

    Departures: the paper goes on with federated distillation, fills up to equal classes (here balance = R), and its
    server adds samples found on the web; here those sent are only repeated. The GAN is a small one, see ``gan.py``.

    Confidence: recalled and from secondary texts; the paper's numbers of samples and its GAN are not known here.

    Disclosed: raw samples sent, in all and per client; the share of true targets among the labels sent (the paper's
    leakage from client to server); and, since a GAN may collapse, for each class the mean distance of two made samples
    over that of two samples sent: 0 if all made are the same, about 1 if they differ as real ones do.

    >>> FAug(balance=0.5).missing(np.array([[12, 0, 1, 3], [4, 4, 4, 4]]))
    array([[0, 2, 1, 0],
           [0, 0, 0, 0]])
    """

    name: ClassVar[str] = "faug"
    title: ClassVar[str] = "FAug"
    reference: ClassVar[str] = (
        "Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation "
        "under Non-IID Private Data, 2018, arXiv:1811.11479"
    )
    privacy: ClassVar[str] = (
        "Raw samples reach the server before round 1: up to `seeds` of each rare class a client holds, hidden among as "
        "many of each of `redundant` other classes. The generator, which may have memorised them, reaches every client."
    )
    targets: ClassVar[tuple[str, ...]] = ("classes",)
    costs: ClassVar[Costs] = Costs(
        down="1 + generator once",
        up="1 + seeds once",
        client_state="synthetic data",
        server_state="generator",
        client_work="more samples",
        server_work="GAN",
    )
    needs_only_sums: ClassVar[bool] = True

    seeds: int = 5
    redundant: int = 1
    balance: float = 1.0
    gan_steps: int = 1000

    @classmethod
    def light(cls) -> FAug:
        """With next to no training of the generator: its quality does not change the costs."""
        return cls(gan_steps=2, seeds=1)

    def __post_init__(self) -> None:
        for name, low in (("seeds", 1), ("redundant", 0), ("balance", 0), ("gan_steps", 1)):
            self.require(getattr(self, name) >= low, name, f"{name} >= {low}")

    def missing(self, counts: Ids) -> Ids:
        """Return how many samples of each class each client lacks, ``[clients, classes]``; targets lack some."""
        goal = np.ceil(self.balance * counts.mean(1, keepdims=True) - 1e-9)  # less what rounding may have added
        lacks: Ids = np.maximum(np.minimum(goal, counts.max(1, keepdims=True)) - counts, 0).astype(np.int64)
        return lacks

    def upload(self, world: FederatedData, client: int, target: Ids) -> tuple[Ids, Ids]:
        """Return the samples that a client with these target classes sends, and their classes, redundant ones too."""
        rng = world.rng("faug seeds", client)
        mine = rng.permutation(world.partition[client])
        y = world.data.y_train[mine]
        others = rng.permutation(np.setdiff1d(y, target))[: self.redundant if len(target) else 0]
        classes = np.concatenate([np.intersect1d(y, target), others])
        return np.concatenate([mine[:0], *(mine[y == r][: self.seeds] for r in classes)]), classes

    def learn(self, world: FederatedData) -> State:
        """The generator; how many samples and labels were sent; how diverse each class is, -1 where that is unknown."""
        return self.learn_by_asking(ask_locally(self, world), world, world.partition.sizes)

    def learn_by_asking(self, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """Train the generator on the samples that clients choose and send."""
        answers = [{k: v.numpy() for k, v in answer.items()} for answer in ask("seeds", lambda _: {}).values()]
        counts, labels = np.stack([sent["counts"] for sent in answers]), [sent["classes"] for sent in answers]
        targets = [np.flatnonzero(row) for row in self.missing(counts)]
        if not any(map(len, targets)):
            return {}
        most = int(counts.max())
        self.require(self.seeds <= most, "seeds", f"seeds <= {most}, since no client holds more samples of one class")
        x, y = (np.concatenate([sent[key] for sent in answers]) for key in ("x", "y"))
        self.require(len(y) > 0, "redundant", "redundant >= 1, since no client holds any sample of a class it lacks")
        data = replace(world.data, x_train=x, y_train=y)
        generator = _gan.train(data, x, y, steps=self.gan_steps, seed=world.seed, device=world.device)
        diversity = np.full(data.classes, -1.0)
        for r in np.unique(y):
            z, label = world.rng("faug diversity", r).standard_normal((PROBED, _gan.LATENT)), np.full(PROBED, r)
            real = _gan.variety(x[y == r][:PROBED])
            if real > 0:
                diversity[r] = _gan.variety(_gan.draw(data, generator, z, label)) / real
        true = sum(len(np.intersect1d(own, target)) for own, target in zip(labels, targets, strict=True))
        return {
            "generator": generator,
            "sent": torch.from_numpy(np.bincount(y, minlength=data.classes)),
            "labels": torch.tensor([true, sum(map(len, labels))]),
            "diversity": torch.from_numpy(diversity),
        }

    def answer(self, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Return one client's class counts, and the samples that it sends."""
        counts = world.counts()[client]
        ids, classes = self.upload(world, client, np.flatnonzero(self.missing(counts[None])[0]))
        sent = {"counts": counts, "x": world.data.x_train[ids], "y": world.data.y_train[ids], "classes": classes}
        return {key: torch.from_numpy(np.array(value)) for key, value in sent.items()}

    def extend_data(self, world: FederatedData, learned: State) -> FederatedData:
        """Every client gets the generator and fills up its targets."""
        if not learned:
            return world
        sent, clients = learned["sent"].numpy(), len(world.partition)
        lacks = self.missing(world.counts()) * (sent > 0)
        noise = [world.rng("faug", j).standard_normal((n, _gan.LATENT)) for j, n in enumerate(lacks.sum(1))]
        owner, y = (np.repeat(ids.ravel(), lacks.ravel()) for ids in np.indices(lacks.shape))
        generated = _gan.draw(world.data, learned["generator"], np.concatenate(noise), y)
        diversity = {f"diversity_class_{r}": float(learned["diversity"][r]) for r in np.flatnonzero(sent)}
        return replace(
            world.with_samples(generated, y, owner),
            one_time_payload={**world.one_time_payload, "generator": learned["generator"]},
            up_once=world.up_once + int(sent.sum()) * (math.prod(world.data.sample_shape) + 1) / clients,
            disclosed={
                **world.disclosed,
                "raw_samples": int(sent.sum()),
                "raw_samples_of_a_client": int(sent.sum()) / clients,
                "share_of_true_targets": int(learned["labels"][0]) / int(learned["labels"][1]),
                "synthetic_samples": len(y),
                **{key: value if value >= 0 else "unknown" for key, value in diversity.items()},
            },
        )
