"""FedAlign: the last stage at a fraction of its width should stretch its input as much as at full width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.errors import BadInputError
from feddpc.methods._algebra import safe_ratio
from feddpc.methods._parts import require_parts
from feddpc.methods.base import ClientContext, Costs, Method
from feddpc.models.narrow import reduced
from feddpc.tasks.base import Batch, Task

#: Power iterations for the top eigenvalue.
ITERATIONS = 10
#: Up to so many units in the last place, two stretches are the same.
ROUNDING = 100


@dataclass(frozen=True, kw_only=True)
class FedAlign(Method):
    """Align the stretch of a narrow last stage with that of the full one.

    The network is trunk, last stage, top. Of each sample the stretch sigma of the last stage is estimated from its
    input and output maps F_in, F_out (channels by HW places; F_in averaged down to F_out's places):

        T = F_in F_out^T / HW;  sigma = sqrt of the top eigenvalue of T T^T, by 10 power iterations from all ones

    Client j:  h = trunk(x) in one full pass, which gives the cross-entropy CE and sigma_full, taken as a constant
               sigma_narrow from the last stage with the first omega of its channels, on those of h, as a constant
               L  = mean (sigma_narrow - sigma_full)^2
               y <- y - eta_l [ grad CE + mu (CE / L) grad L ]           (nothing of L when L = 0, to rounding)
    Server:    as FedAvg

    | symbol | name  | default | domain         |
    |--------|-------|---------|----------------|
    | mu     | mu    | 0.45    | mu >= 0        |
    | omega  | omega | 0.25    | 0 < omega <= 1 |
    |        | clip  | 10      | clip > 0       |

    Gradients longer than clip are shortened to it, as in the code: nothing else bounds CE / L. With that, mu = 0 is
    FedAvg, and so is omega = 1. The factor CE / L makes the added term as large as mu CE whatever L is, so
    the training loss reported is (1 + mu) CE (CE where L is zero).

    Needs: trunk, last_stage, top. The last stage is the fourth of resnet18, the second convolution of lenet5 and cnn,
    the last hidden layer of mlp. A network of your own defines trunk(x), last_stage(h, width) and top(o).

    Departures: GroupNorm at the reduced width, so its groups must divide that (the code: BatchNorm with statistics of
    the batch); reduced widths are rounded to whole channels (the code: multiples of 8; the same for multiples of 32
    channels at omega = 1/4); maps that are zero have sigma = 0 and no gradient (the code: NaN); T is not formed where
    its factors are smaller. The code's optimizer is ``client_optimizer = "sgd"`` with ``momentum = 0.9``,
    ``nesterov = true`` and ``weight_decay = 1e-4``; the default is plain SGD. Uniform weights unless the experiment
    weights by samples (the code: by batches).

    Confidence: the authors' code, and the paper through it.

    >>> f_in, f_out = torch.tensor([[[3.0], [4.0]]]), torch.tensor([[[2.0]]])
    >>> stretch(f_in, f_out)  # of rank one: |F_in| |F_out|
    tensor([10.])
    """

    name: ClassVar[str] = "fedalign"
    title: ClassVar[str] = "FedAlign"
    reference: ClassVar[str] = "Mendieta et al., Local Learning Matters, CVPR 2022, arXiv:2111.14213"
    targets: ClassVar[tuple[str, ...]] = ("classes", "floats", "multihot")
    costs: ClassVar[Costs] = Costs(client_work="last stage again, narrow")
    needs_only_sums: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("trunk", "last_stage", "top")

    mu: float = 0.45
    omega: float = 0.25
    clip: float = 10.0

    def __post_init__(self) -> None:
        self.require(self.clip > 0, "clip", "clip > 0")
        self.require(self.mu >= 0, "mu", "mu >= 0")
        self.require(0 < self.omega <= 1, "omega", "0 < omega <= 1")

    def adapt(self, module: nn.Module) -> nn.Module:
        """Change nothing, but see that the last stage can be that narrow."""
        require_parts(self, module)
        too_narrow = getattr(module, "too_narrow", lambda _: None)  # a network of your own need not know beforehand
        if why := too_narrow(self.omega):
            raise BadInputError(f"{self.name}: omega = {self.omega}: {why}: choose another omega or number of groups")
        return module

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """Shorten long gradients."""
        length: Tensor = torch.linalg.vector_norm(g)
        return g * (self.clip / length.clamp(min=self.clip))

    def objective(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> Tensor:
        """Cross-entropy, and mu of it in the direction of the alignment loss."""
        if self.mu == 0 or self.omega == 1:
            return task.loss(y, batch)
        # one call for all parts: each would pay its own way from and back to the vector
        h, o, narrow, logits = task.part(y, full_and_narrow, batch.x, self.omega)
        ce = batch.mean(task.losses(logits, batch.y))
        h = fitted(h, o)
        full = stretch(h, o.detach())
        gap = stretch(h[:, : reduced(h.shape[1], self.omega)], narrow) - full
        loss, scale = (batch.mean(values.square()) for values in (gap, full))
        counts = loss.detach() > (ROUNDING * torch.finfo(y.dtype).eps) ** 2 * scale
        return ce + self.mu * safe_ratio(ce.detach(), torch.where(counts, loss.detach(), 0.0)) * loss


def full_and_narrow(net: Any, x: Tensor, omega: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the last stage's input as a constant, its full output, its narrow output on that input, and the logits."""
    h = net.trunk(x)
    o = net.last_stage(h)
    return h.detach(), o, net.last_stage(h.detach(), omega), net.top(o)


def fitted(f_in: Tensor, f_out: Tensor) -> Tensor:
    """Return ``f_in`` averaged down to as many places as ``f_out`` has."""
    if f_in.ndim == 4 and f_in.shape[2:] != f_out.shape[2:]:
        f_in = F.adaptive_avg_pool2d(f_in, (f_out.shape[2], f_out.shape[3]))
    return f_in


def stretch(f_in: Tensor, f_out: Tensor) -> Tensor:
    """Return sigma of every sample, ``[n]``, for maps ``[n, channels, ...]``; 0 where either map is zero."""
    f_in = fitted(f_in, f_out)
    a, b = (f.reshape(*f.shape[:2], -1) for f in (f_in, f_out))
    places = b.shape[2]
    if places < a.shape[1]:  # K = T T^T has the rank of the places: K v = a (m (a^T v)) is less work than K
        m = b.mT @ b / places**2
        return _root_of_top(lambda v: a @ (m @ (a.mT @ v)), ((a @ m) * a).sum((1, 2)), a)
    t = a @ b.mT / places
    k = t @ t.mT
    return _root_of_top(lambda v: k @ v, t.square().sum((1, 2)), a)


def _root_of_top(apply: Callable[[Tensor], Tensor], trace: Tensor, like: Tensor) -> Tensor:
    """Return the square root of the top eigenvalue of positive matrices, given by what they make of vectors.

    Divided by its trace, a matrix of rank r has a top eigenvalue between 1/r and 1, so the vectors shrink slowly and
    are brought back to length once, half way; their length does not matter to the result.
    """
    size = torch.where(trace > 0, trace, 1.0).detach()[:, None, None]
    v = torch.ones_like(like[:, :, :1])
    for k in range(ITERATIONS):
        before, v = v, apply(v) / size
        if k == ITERATIONS // 2:
            length = torch.linalg.vector_norm(v.detach(), dim=1, keepdim=True)
            v = safe_ratio(v, length)
    n2, n2_before = (x.square().sum((1, 2)) for x in (v, before))
    alive = n2 > 0
    ratio = torch.where(alive, n2, 1.0) / torch.where(alive, n2_before, 1.0)  # a root of zero has no finite gradient
    return torch.where(alive, (ratio.sqrt() * size[:, 0, 0]).sqrt(), 0.0)
