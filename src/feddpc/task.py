"""The learning task of one client: loss, gradient and full gradient as functions of one parameter vector."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from feddpc.data import Dataset
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.models.flat import Flat

Objective = Callable[[Tensor], Tensor]
Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


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


class Rows(NamedTuple):
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
        """Average one value a sample over the samples that are no padding."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)


def by_autograd(objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by plain autograd: what the reference engine uses."""
    leaf = y.detach().requires_grad_(True)
    with torch.enable_grad():
        value = objective(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def by_transform(objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by function transform: what works under ``vmap``."""
    gradient, value = torch.func.grad_and_value(objective)(y)
    return value, gradient


@dataclass
class Tally:
    """Counts the work of clients; an engine that runs several at once says how many in ``clients``."""

    gradients: int = 0
    passes: int = 0
    clients: int = 1

    def add(self, gradients: int = 0, passes: int = 0) -> None:
        """Count."""
        self.gradients += gradients * self.clients
        self.passes += passes * self.clients

    def put_back(self, was: Tally) -> None:
        """Forget what was counted since ``was``, a copy."""
        self.gradients, self.passes, self.clients = was.gradients, was.passes, was.clients


class Task(ABC):
    """What a method may ask of one client's learning problem; parameters are always one vector ``[d]``."""

    d: int
    tally: Tally
    traces: dict[Any, dict[Any, Any]]  #: what engines have traced of it and its twins, which compute the same
    device: torch.device = torch.device("cpu")
    stochastic: bool = False
    differentiate: Callable[[Objective, Tensor], tuple[Tensor, Tensor]] = staticmethod(by_autograd)

    def __init__(self) -> None:
        self.tally, self.traces = Tally(), {}

    def value_and_grad(self, objective: Objective, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient of ``objective`` at ``y``."""
        self.tally.add(gradients=1)
        return self.differentiate(objective, y)

    @abstractmethod
    def fetch(self, rows: Rows) -> Batch:
        """Return the samples that ``rows`` names, scaled and augmented."""

    @abstractmethod
    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of ``batch`` at parameters ``y``."""

    def part(self, y: Tensor, name: str | Callable[..., Any], *args: Any) -> Any:
        """Return what a part of the network, such as ``features``, makes of ``args`` at parameters ``y``."""
        raise BadInputError(f"{type(self).__name__} has no network, so there is no {name}: choose another method")

    def mask(self, prefix: str) -> Tensor:
        """Return a vector that is 1 at the parameters whose names start with ``prefix``."""
        raise BadInputError(f"{type(self).__name__} has no network, so there is no {prefix}: choose another method")

    def inputs(self, x: Tensor) -> Tensor:
        """Return samples as the network wants them; ``x`` has the values of the data set, averages of them included."""
        return x

    def full_gradient(self, y: Tensor, data: Iterable[Rows]) -> Tensor:
        """Return the gradient at ``y`` of the mean loss over all samples of ``data``."""
        total, seen = torch.zeros_like(y), y.new_zeros(())
        for rows in data:
            batch = self.fetch(rows)
            count = y.new_tensor(rows.samples.shape[-1]) if batch.mask is None else batch.mask.sum()
            _, gradient = self.value_and_grad(lambda at, batch=batch: self.loss(at, batch), y)  # type: ignore[misc]
            total, seen = total + count * gradient, seen + count
        return total / seen

    def traces_of(self, *what: object, given: Collection[str] = ()) -> dict[Any, Any]:
        """Return where traces of something are kept as long as the task has the same tensors, which are part of them.

        But for those that are ``given`` to what was traced.
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
        twin.tally, twin.traces = Tally(), self.traces
        return twin

    def transformable(self, *, stacked: bool = True, together: bool = False) -> Self:
        """Return this task with gradients that work under ``vmap`` and compilers; ``stacked`` for the former.

        With ``together``, images and kernels of convolutions have the channels of a pixel together.
        """
        twin = copy.copy(self)
        twin.differentiate, twin.traces = by_transform, self.traces  # engines tell apart what they make of it
        return twin


class Classification(Task):
    """Cross-entropy of a module on a data set that is resident on the device.

    Training images stay uint8 on the device and are scaled batch by batch; test images are scaled once when that takes
    less than ``resident_bytes``.
    """

    resident_bytes = 1 << 30

    def __init__(
        self,
        module: nn.Module,
        data: Dataset,
        scaler: Scaler,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shift: int = 0,
        half: bool = False,
    ) -> None:
        super().__init__()
        self.module = module.to(device=device, dtype=dtype)
        self.flat = Flat(self.module)
        self.d = self.flat.d
        self._masks: dict[str, Tensor] = {}
        self.scaler = scaler.to(device, dtype)
        self.shift, self.half = shift, half
        self.classes = data.classes
        self.x, self.y = (t.to(device) for t in tensors(data.x_train, data.y_train))
        self.device = self.x.device
        x_test, self.y_test = (t.to(device) for t in tensors(data.x_test, data.y_test))
        floats = x_test.numel() * torch.empty((), dtype=dtype).element_size()
        self.test_scaled = floats <= self.resident_bytes
        # Convolutions on a CPU are faster on images whose channels lie together.
        self.image_layout = torch.channels_last if self.x.ndim == 4 and self.x.device.type == "cpu" else None
        self.x_test = self._laid_out(self.scaler(x_test)) if self.test_scaled else x_test
        self.module.train()
        self.stochastic = self._try_out(data.classes)

    def changed(self, *, module: nn.Module | None = None, data: Dataset | None = None) -> Self:
        """Return this task with another network or other training samples; what stays is shared, tests included."""
        twin = copy.copy(self)
        twin.tally = Tally()
        if data is not None:
            twin.x, twin.y = (t.to(self.x.device) for t in tensors(data.x_train, data.y_train))
        if module is not None:
            twin.module = module.to(device=self.x.device, dtype=self.scaler.dtype).train()
            twin.flat, twin._masks = Flat(twin.module), {}
            twin.d = twin.flat.d
            twin.stochastic = twin._try_out(int(self.classes))
        return twin

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and inputs."""
        return self.scaler.dtype

    def reduced(self, precision: str, tests: int = 8) -> Self:
        """Return a copy for trials: a network of its own in ``precision``, and a few test samples."""
        dtype = torch.float64 if precision == "float64" else torch.float32
        twin = copy.copy(self)
        twin.tally, twin.traces, twin._masks = Tally(), {}, {}
        twin.module = copy.deepcopy(self.module).to(dtype)
        twin.flat = Flat(twin.module)
        twin.scaler = self.scaler.to(self.device, dtype)
        twin.half = precision == "bf16"
        twin.x_test, twin.y_test = self.x_test[:tests], self.y_test[:tests]
        if self.test_scaled:
            twin.x_test = twin.x_test.to(dtype)
        return twin

    def twin(self) -> Self:
        """Return this task with a network of its own, into which a call swaps its parameters; samples are shared."""
        twin = super().twin()
        twin.module = copy.deepcopy(self.module)
        twin.flat = Flat(twin.module)
        return twin

    def _try_out(self, classes: int) -> bool:
        """Send one sample through the module; say whether it draws random numbers, or what is wrong with it."""
        x = self.fetch(Rows(torch.zeros(1, dtype=torch.int64, device=self.x.device))).x
        with torch.no_grad(), forked(self.x.device) as generator:
            before = generator.get_state()
            try:
                output = self.module(x)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                shape = "x".join(str(n) for n in x.shape[1:])
                raise BadInputError(f"the model cannot take a sample of shape {shape}: {error}") from None
            moved = not torch.equal(before, generator.get_state())
        if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < classes:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            first = int(self.y.min())
            hint = f"; labels begin at {first}, but classes count from 0, and class 0 has no sample" if first else ""
            raise BadInputError(
                f"the model must give [samples, {classes}] scores for {classes} classes, but gives {got}{hint}"
            )
        return moved

    def initial(self) -> Tensor:
        """Return the module's parameters as the first global model."""
        return self.flat.vector()

    def fetch(self, rows: Rows) -> Batch:
        """Gather, augment and scale the samples of ``rows`` on the device."""
        x = self.x[rows.samples]
        if rows.draws is not None:
            x = crop_and_flip(x, rows.draws, self.shift)
        mask = None if rows.mask is None else rows.mask.to(self.scaler.dtype)
        return Batch(self.inputs(x), self.y[rows.samples], mask)

    def part(self, y: Tensor, name: str | Callable[..., Any], *args: Any) -> Any:
        """Call a method of the network with parameters ``y``."""
        self.tally.add(passes=1)
        with self._rounded():
            made = self.flat.part(y, name, *args)
        return tree_map(lambda t: t.to(y.dtype), made) if self.half else made

    def mask(self, prefix: str) -> Tensor:
        """Return 1 at the parameters of one part of the network."""
        if prefix not in self._masks:
            self._masks[prefix] = self.flat.mask(prefix).to(self.x.device, self.scaler.dtype)
        return self._masks[prefix]

    def inputs(self, x: Tensor) -> Tensor:
        """Scale samples ``[n, channels, height, width]``."""
        return self._laid_out(self.scaler(x))

    def _laid_out(self, x: Tensor) -> Tensor:
        return x if self.image_layout is None else x.contiguous(memory_format=self.image_layout)

    def transformable(self, *, stacked: bool = True, together: bool = False) -> Self:
        """Return this task for function transforms; ``vmap`` stacks clients and has no layout of channels."""
        twin = super().transformable()
        twin.image_layout = torch.channels_last if self.x.ndim == 4 and not stacked else None
        twin.flat = copy.copy(self.flat)
        twin.flat.together = together and not stacked
        return twin

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        self.tally.add(passes=1)
        return batch.mean(F.cross_entropy(self._logits(y, batch.x), batch.y, reduction="none"))

    def _logits(self, y: Tensor, x: Tensor) -> Tensor:
        with self._rounded():
            return self.flat(y, x).to(y.dtype)

    def _rounded(self) -> AbstractContextManager[object]:
        """Let the network, and nothing else, compute in bfloat16, if that is the experiment's precision."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def evaluate(self, w: Tensor, batch_size: int = 500) -> tuple[float, float]:
        """Return accuracy and mean loss of ``w`` on the test set."""
        correct, loss = self.score(w, batch_size)
        return correct.item() / len(self.y_test), loss.item() / len(self.y_test)

    def judged(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many of these test samples ``w`` gets right and the sum of their losses."""
        logits = self._logits(w, self._laid_out(x if self.test_scaled else self.scaler(x)))
        return (logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum").double()

    @torch.no_grad()
    def score(self, w: Tensor, batch_size: int = 500, judge: Judge | None = None) -> tuple[Tensor, Tensor]:
        """Return the same for the whole test set, still on the device; ``judge`` may be ``judged``, compiled."""
        self.module.eval()
        judge = judge or self.judged
        correct = torch.zeros((), dtype=torch.int64, device=w.device)
        loss = torch.zeros((), dtype=torch.float64, device=w.device)
        for x, y in zip(torch.split(self.x_test, batch_size), torch.split(self.y_test, batch_size), strict=True):
            right, cost = judge(w, x, y)
            correct += right
            loss += cost
        self.module.train()
        return correct, loss


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return samples and labels as tensors; images ``[n, h, w, c]`` become ``[n, c, h, w]``."""
    if x.dtype == np.uint8:
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.array(x, order="C")), torch.from_numpy(np.array(y, dtype=np.int64))


def crop_and_flip(x: Tensor, draws: Tensor, shift: int) -> Tensor:
    """Shift every image by up to ``shift`` pixels over a border of zeros and mirror it, as ``draws`` says.

    ``draws[:, 0]`` and ``draws[:, 1]`` are the crop's corner in the image padded by ``shift`` on every side,
    ``draws[:, 2]`` is 1 for a mirrored image.
    """
    *_, height, width = x.shape
    padded = F.pad(x, (shift, shift, shift, shift))
    draws = draws.to(torch.int64)
    rows = torch.arange(height, device=x.device) + draws[:, 0:1]
    columns = torch.arange(width, device=x.device)
    columns = torch.where(draws[:, 2:3] == 1, width - 1 - columns, columns) + draws[:, 1:2]
    images = torch.arange(len(x), device=x.device)[:, None, None, None]
    channels = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]
