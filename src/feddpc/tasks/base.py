"""The learning task of one client: loss, gradient and full gradient as functions of one parameter vector."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from feddpc.data.array_checks import IGNORED
from feddpc.errors import BadInputError
from feddpc.models.traits import Traits
from feddpc.tasks.host_samples import HostSamples, Ints
from feddpc.tasks.metrics import LOSS, Metric

Objective = Callable[[Tensor], Tensor]
#: From so many parameters on, copies of a model are saved even where that takes more code.
LARGE = 1 << 24


@contextmanager
def forked(device: torch.device, seed: int | None = None) -> Iterator[torch.Generator]:
    """Lend the global generator of ``device``, seeded if asked, and put its state back afterwards."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        generator = torch.default_generator
        if cuda:
            index: int | None = device.index  # None means the current one
            generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        if seed is not None:
            generator.manual_seed(seed)
        yield generator


class BatchIndices(NamedTuple):
    """Which samples make a batch: indices, a mask where some are padding, and what augmentation drew for them."""

    samples: Tensor
    mask: Tensor | None = None
    draws: Tensor | None = None


class Batch(NamedTuple):
    """Samples of one batch: inputs, targets, and a mask where some are padding."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Average one value per sample, or per sample and token, over what is neither padding nor ignored."""
        if values.ndim > 1:
            counted = self._counted_tokens(values.dtype)
            return (values * counted).sum() / counted.sum().clamp(min=1)
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)

    def number(self, like: Tensor, per_token: bool = True) -> Tensor:
        """Return over how many values :meth:`mean` averages: tokens where each has a loss, else samples."""
        if per_token and self.y.ndim > 1 and not self.y.is_floating_point():
            return self._counted_tokens(like.dtype).sum()
        return like.new_tensor(self.x.shape[0]) if self.mask is None else self.mask.sum()

    def _counted_tokens(self, dtype: torch.dtype) -> Tensor:
        counted = (self.y != IGNORED).to(dtype)
        return counted if self.mask is None else counted * self.mask[:, None].to(dtype)


def by_autograd(objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by plain autograd: what the reference engine uses.

    The gradient of a large model is added up in place, one parameter after the other (see `Flat.parameters`): autograd
    would hold all parameters' gradients, and a copy of them as one vector.
    """
    leaf = y.detach().requires_grad_(True)
    if leaf.numel() >= LARGE:
        leaf.grad = torch.zeros_like(leaf)
    with torch.enable_grad():
        value = objective(leaf)
    if leaf.grad is None:
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), leaf.grad


def by_transform(objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by function transform: what works under ``vmap``."""
    gradient, value = torch.func.grad_and_value(objective)(y)
    return value, gradient


@dataclass
class WorkCounter:
    """Counts the work of clients; an engine that runs several at once says how many in ``clients``."""

    gradients: int = 0
    passes: int = 0
    clients: int = 1

    def add(self, gradients: int = 0, passes: int = 0) -> None:
        """Count."""
        self.gradients += gradients * self.clients
        self.passes += passes * self.clients

    def reset_to(self, was: WorkCounter) -> None:
        """Forget what was counted since ``was``, a copy."""
        self.gradients, self.passes, self.clients = was.gradients, was.passes, was.clients


class Task(ABC):
    """What a method may ask of one client's learning problem; parameters are always one vector ``[d]``."""

    d: int
    work: WorkCounter
    traces: dict[Any, dict[Any, Any]]  #: what engines have traced of it and its twins, which compute the same
    device: torch.device = torch.device("cpu")
    stochastic: bool = False
    host: HostSamples | None = None  #: where its training samples are, if they are not all on the device
    traits: Traits = Traits((), False, 1)  #: what its network measures while it trains, and whether it mixes samples
    loss_per_token: bool = True  #: whether each token of a sequence has a loss, or only the sequence
    metrics: tuple[Metric, ...] = (LOSS,)  #: what `evaluate` measures, the primary one first; the loss is among them
    differentiate: Callable[[Objective, Tensor], tuple[Tensor, Tensor]] = staticmethod(by_autograd)

    def __init__(self) -> None:
        self.work, self.traces = WorkCounter(), {}

    def value_and_grad(self, objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient of ``objective`` at ``y``."""
        self.work.add(gradients=1)
        return self.differentiate(objective, y)

    @abstractmethod
    def fetch(self, rows: BatchIndices) -> Batch:
        """Return the samples that ``rows`` names, scaled and augmented."""

    def samples(self, ids: Ints) -> Batch:
        """Return training samples by their numbers, neither augmented nor padded."""
        return self.fetch(BatchIndices(torch.tensor(ids, device=self.device)))

    @abstractmethod
    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of ``batch`` at parameters ``y``."""

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per sample, or per sample and token, of what a network gives."""
        raise BadInputError(f"{type(self).__name__} has no network, so there are no outputs: choose another method")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return :meth:`sample_losses` of outputs that have the shape of their targets."""
        return self.sample_losses(outputs, targets)

    def evaluate(self, w: Tensor) -> dict[str, float]:
        """Return the metrics of model ``w`` on the test set by name; nothing where a task has no evaluation."""
        return {}

    def part(self, y: Tensor, name: str | Callable[..., Any], *args: Any) -> Any:
        """Return what a part of the network, such as ``features``, makes of ``args`` at parameters ``y``."""
        raise BadInputError(f"{type(self).__name__} has no network, so there is no {name}: choose another method")

    def mask(self, prefix: str) -> Tensor:
        """Return a vector that is 1 at the parameters whose names start with ``prefix``."""
        raise BadInputError(f"{type(self).__name__} has no network, so there is no {prefix}: choose another method")

    def norm_mask(self, y: Tensor) -> Tensor:
        """Return a vector like ``y`` that is 1 at the scales and shifts of normalization layers."""
        return torch.zeros_like(y)

    def inputs(self, x: Tensor) -> Tensor:
        """Return samples as the network wants them; ``x`` has the values of the data set, averages of them included."""
        return x

    def full_gradient(self, y: Tensor, data: Iterable[BatchIndices]) -> Tensor:
        """Return the gradient at ``y`` of the mean loss over all samples of ``data``."""
        total, seen = torch.zeros_like(y), y.new_zeros(())
        for rows in data:
            batch = self.fetch(rows)
            count = batch.number(y, self.loss_per_token)
            _, gradient = self.value_and_grad(lambda at, batch=batch: self.loss(at, batch), y)  # type: ignore[misc]
            total, seen = total + count * gradient, seen + count
        return total / seen

    def traces_of(self, *what: object, given: Collection[str] = ()) -> dict[Any, Any]:
        """Return the cache of traces of ``what``; it is a new one when a tensor of the task is replaced.

        Traces hold the task's tensors as constants, except those named in ``given``, which they take as arguments.
        """
        mine = ((name, value) for name, value in vars(self).items() if name not in given)
        held = tuple((name, id(value)) for name, value in mine if isinstance(value, Tensor))
        return self.traces.setdefault((*what, held), {})

    def __getstate__(self) -> dict[str, Any]:
        """Leave traces out of copies, which may be changed, and of files."""
        return {**vars(self), "traces": {}}

    def twin(self) -> Self:
        """Return this task for another thread: with counters of its own, and all else that a call changes."""
        twin = copy.copy(self)
        twin.work, twin.traces = WorkCounter(), self.traces
        return twin

    def transformable(self, *, stacked: bool = True, together: bool = False) -> Self:
        """Return this task with gradients that work under ``vmap`` and compilers; ``stacked`` for the former.

        With ``together``, images and kernels of convolutions have the channels of a pixel together.
        """
        twin = copy.copy(self)
        twin.differentiate, twin.traces = by_transform, self.traces  # engines tell apart what they make of it
        return twin
