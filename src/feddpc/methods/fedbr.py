"""FedBR: shared pseudo-data on which local classifiers stay undecided and local features stay global."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.methods._parts import require_parts
from feddpc.methods.base import ClientContext, Costs, Method, State
from feddpc.methods.federated_data import Ask, FederatedData, Ids, ask_locally
from feddpc.models.heads import WithProjector
from feddpc.tasks.base import Batch, Task
from feddpc.tasks.host_samples import sample_tensor


@dataclass(frozen=True, kw_only=True)
class FedBR(Method):
    """Keep local models unbiased on shared pseudo-data.

    Before round 1 every client receives the same pseudo-samples x_p, each the mean of some samples of one random
    client. The network has features phi, a classifier, and a projector P (three linear layers). With phi_g, the
    features of the global model, and x, the sample paired with x_p:

        r = log( e^{t1 cos(P phi(x_p), P phi_g(x_p))} / (e^{same} + e^{t2 cos(P phi(x_p), P phi(x))}) )

    Client j:  max step:  P <- P - eta_l grad_P mean r                                     (features frozen)
               min step:  phi, classifier <- those - eta_l grad [ CE(x, label) + lam CE(x_p, uniform) - mu mean r ]
                                                                                          (with the new P, frozen)
    Server:    as FedAvg, P included

    | symbol | name     | default | domain                                                              |
    |--------|----------|---------|---------------------------------------------------------------------|
    | lambda | lam      | 1       | lam >= 0                                                            |
    | mu     | mu       | 0.5     | mu >= 0; 0 leaves P alone                                           |
    | tau_1  | t1       | 2       | t1 > 0, a factor                                                    |
    | tau_2  | t2       | 2       | t2 > 0, a factor                                                    |
    |        | pseudo   | 32      | pseudo >= 1, how many pseudo-samples                                |
    |        | averaged | 10      | averaged >= 1, samples in each, drawn with replacement              |
    |        | mixture  | false   | true: average x_p with the paired x, and its target with x's label |

    lam = mu = 0 is FedAvg. Pseudo-sample i is paired with sample i mod n of a batch of n. The training loss reported is
    CE(x, label). A step costs one pass over batch and pseudo-data, shared by both steps, and one more forward pass over
    the pseudo-data for phi_g (the ``stacked`` engine makes that one once for all clients, unless mixture is on). P has
    about 8 f^2 parameters for f features, which for a small network can be more than the network itself.

    Needs: features, head. Any network works whose head is an nn.Linear on top of features(x).

    Departures: phi_g is recomputed in every step, to the same numbers, as a client's hooks keep nothing but vectors
    like the model (the code: once per round); so with mixture it belongs to the step's own mixed samples (the code: to
    those of the round's first step). Mixture keeps the clients' pseudo-samples (the code takes them from a proxy set)
    and mixes in the paired sample (the code: a random one of the batch, which is in random order already). Sizes of
    batch and pseudo-data may differ. Plain SGD as in the code, all clients with the same weight; with another
    ``client_optimizer`` the new P in the min step is still that of a plain step.

    Confidence: the authors' code, and the paper through it.

    >>> FedBR(lam=0.5).hyper()["lam"]
    0.5
    """

    name: ClassVar[str] = "fedbr"
    title: ClassVar[str] = "FedBR"
    reference: ClassVar[str] = "Guo, Tang, Lin, FedBR, ICML 2023, arXiv:2205.13462"
    privacy: ClassVar[str] = (
        "Averages of a few raw samples (10, unless set otherwise) of randomly chosen clients go to the server and from "
        "there to every client. An average of few samples can show what these look like; that of a client with one "
        "sample is the sample."
    )
    targets: ClassVar[tuple[str, ...]] = ("classes",)
    costs: ClassVar[Costs] = Costs(
        down="1 + P", up="1 + P", client_state="pseudo-data", client_work="about 3 forward passes per step"
    )
    needs_only_sums: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("features", "head")

    lam: float = 1.0
    mu: float = 0.5
    t1: float = 2.0
    t2: float = 2.0
    pseudo: int = 32
    averaged: int = 10
    mixture: bool = False

    def __post_init__(self) -> None:
        for name in ("lam", "mu"):
            self.require(getattr(self, name) >= 0, name, f"{name} >= 0")
        for name in ("t1", "t2"):
            self.require(getattr(self, name) > 0, name, f"{name} > 0")
        for name in ("pseudo", "averaged"):
            self.require(getattr(self, name) >= 1, name, f"{name} >= 1")

    def adapt(self, module: nn.Module) -> nn.Module:
        """Add the projector."""
        require_parts(self, module)
        return WithProjector(module)

    def learn(self, world: FederatedData) -> State:
        """Average samples of random clients, in the values and layout of the data."""
        return self.learn_by_asking(ask_locally(self, world), world, world.partition.sizes)

    def learn_by_asking(self, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """The server draws clients and places of samples, and the clients send the averages."""
        rng, holders = world.rng("fedbr"), np.flatnonzero(sizes)
        owners = np.zeros(self.pseudo, np.int64)
        places = np.zeros((self.pseudo, self.averaged), np.int64)
        for i in range(self.pseudo):
            owners[i] = holders[rng.integers(len(holders))]
            places[i] = rng.choice(sizes[owners[i]], self.averaged)
        answers = ask("averages", lambda client: {"places": torch.from_numpy(places[owners == client])})
        pseudo = torch.cat([answer["x_p"] for answer in answers.values()])
        back = np.argsort(np.argsort(owners, kind="stable"))  # from the order of clients to the order of drawing
        return {"x_p": pseudo[torch.from_numpy(back)]}

    def answer(self, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Return averages of one client's samples at the places that the server drew."""
        places, mine = asked["places"].numpy(), world.partition[client]
        x = sample_tensor(world.data, world.data.x_train[mine[places.reshape(-1)]])
        return {"x_p": x.reshape(*places.shape, *x.shape[1:]).double().mean(1).float()}

    def extend_data(self, world: FederatedData, learned: State) -> FederatedData:
        """Hand the pseudo-samples to all clients."""
        return replace(
            world,
            one_time_payload={**world.one_time_payload, "x_p": learned["x_p"].to(world.device)},
            up_once=world.up_once + learned["x_p"].numel() / len(world.partition),
            disclosed={**world.disclosed, "averages": self.pseudo, "samples_per_average": self.averaged},
        )

    def objective(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> Tensor:
        """The value of CE(x, label), with the gradient of the max step for P and of the min step for all else."""
        if self.lam == self.mu == 0:
            return task.loss(y, batch)
        size = len(batch.y)
        n = size if batch.mask is None else batch.mask.sum().clamp(min=1)
        pair = (torch.arange(self.pseudo, device=y.device) % n).long()
        x_p = task.inputs(ctx.broadcast["x_p"])
        if self.mixture:
            x_p = (x_p + batch.x[pair]) / 2
        f, logits = task.part(y, "features_and_logits", torch.cat([batch.x, x_p]))
        ce = batch.mean(task.losses(logits[:size], batch.y))
        target = torch.full_like(logits[size:], 1 / logits.shape[1])
        if self.mixture:
            label = batch.y[pair][:, None] == torch.arange(logits.shape[1], device=y.device)
            target = (target + label) / 2
        rest = self.lam * F.cross_entropy(logits[size:], target)
        if self.mu:
            # By a product, since what indexing gives back to repeated rows is summed in any order on a GPU.
            paired = (pair[:, None] == torch.arange(size, device=y.device)).to(f.dtype) @ f[:size]
            three = torch.cat([f[size:], task.part(ctx.w, "features", x_p), paired])
            frozen, seen = y.detach(), three.detach()
            _, g = task.differentiate(lambda at: self.ratio(task, at, seen), frozen)  # of P alone: not counted
            rest = rest - self.mu * self.ratio(task, frozen - ctx.lr * g, three)
            rest = rest + (y * g.detach()).sum()  # whose gradient is the max step's, zero but for P
        return ce + (rest - rest.detach())

    def ratio(self, task: Task, y: Tensor, three: Tensor) -> Tensor:
        """Return the mean of r; ``three`` stacks phi(x_p), phi_g(x_p) and phi(x)."""
        ctx, there, own = task.part(y, "project", three).chunk(3)
        similar = [self.t1 * F.cosine_similarity(ctx, there), self.t2 * F.cosine_similarity(ctx, own)]
        return F.log_softmax(torch.stack(similar, 1), 1)[:, 0].mean()
