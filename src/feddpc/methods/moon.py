"""MOON: representations that stay close to the global model's and leave the client's old one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.methods._parts import require_parts
from feddpc.methods.base import ClientContext, Costs, Method, State
from feddpc.models.heads import WithProjection
from feddpc.tasks.base import Batch, Task


@dataclass(frozen=True, kw_only=True)
class MOON(Method):
    """Pull representations to the global model's, away from the client's old one's.

    Between features and classifier stands a projection head (linear, ReLU, linear); z, z_glob and z_prev are what the
    local model, w_{t-1} and the client's last local model make of a sample there, the latter two frozen.

    Client j:  l_con = -log( e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}) )
               y    <- y - eta_l grad [ cross-entropy + mu mean l_con ]
               keeps its last y for its next participation
    Server:    as FedAvg

    | symbol | name  | default | domain                                     |
    |--------|-------|---------|--------------------------------------------|
    | mu     | mu    | 1       | mu >= 0                                    |
    | tau    | tau   | 0.5     | tau > 0                                    |
    |        | width | 256     | width >= 1, of the projection head's output |

    mu = 0 is FedAvg on the network with the projection head. The authors' best mu is 5 on CIFAR-10 and 1 on CIFAR-100
    and Tiny ImageNet. The training loss reported is that of the whole objective.

    Needs: features, head. Any network works whose head is an nn.Linear on top of features(x).

    Departures: a client that comes for the first time has z_prev = z_glob, so that l_con is log 2 and pulls nowhere
    (the authors' code: no l_con in round 1, later the client's own random initial network); the last partial batch
    counts. The code's optimizer is ``client_optimizer = "sgd"`` with ``momentum = 0.9`` and ``weight_decay = 1e-5``;
    the default is plain SGD. One old model is kept, as by default in the code. Uniform weights unless the experiment
    weights by samples (the code does).

    Confidence: the authors' code read; the paper through summaries.

    >>> z, near, far = (torch.tensor([v]) for v in ([1.0, 0.0], [2.0, 0.0], [0.0, 3.0]))
    >>> contrast(z, near, far, tau=0.5)  # log(1 + e^{-1/tau})
    tensor([0.1269])
    """

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"
    reference: ClassVar[str] = "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, arXiv:2103.16257"
    targets: ClassVar[tuple[str, ...]] = ("classes", "floats", "multihot")
    costs: ClassVar[Costs] = Costs(client_state="1", client_work="two extra forward passes")
    needs_only_sums: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("features", "head")

    mu: float = 1.0
    tau: float = 0.5
    width: int = 256

    def __post_init__(self) -> None:
        self.require(self.mu >= 0, "mu", "mu >= 0")
        self.require(self.tau > 0, "tau", "tau > 0")
        self.require(self.width >= 1, "width", "width >= 1")

    def adapt(self, module: nn.Module) -> nn.Module:
        """Put the projection head between features and classifier, which is a new one."""
        require_parts(self, module)
        return WithProjection(module, self.width)

    def init_client(self, w: Tensor) -> State:
        """The last local model, and whether there is one."""
        return {"prev": w.clone(), "seen": w.new_zeros(())}

    def objective(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> Tensor:
        """Cross-entropy and contrast, from one pass of the local model and one each of the frozen ones."""
        if self.mu == 0:
            return task.loss(y, batch)
        z, logits = task.part(y, "projections_and_logits", batch.x)
        z_glob = task.part(ctx.w, "project", batch.x)
        z_prev = torch.where(ctx.state["seen"] > 0, task.part(ctx.state["prev"], "project", batch.x), z_glob)
        l_con = contrast(z, z_glob, z_prev, self.tau)
        return batch.mean(task.losses(logits, batch.y) + self.mu * l_con)

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """Remember the local model."""
        return {"delta": ctx.w - y}, {"prev": y, "seen": torch.ones_like(ctx.state["seen"])}


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return l_con of every sample, ``[n]``; log 2 where ``z_glob`` and ``z_prev`` are the same."""
    cosines = F.cosine_similarity(z[:, None], torch.stack([z_glob, z_prev], 1), dim=2)
    return -F.log_softmax(cosines / tau, 1)[:, 0]
