"""Classification with cross-entropy: a network, and samples that are resident on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from feddpc.data import Dataset
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.models.flat import Flat
from feddpc.tasks.base import Batch, Rows, Tally, Task, forked
from feddpc.tasks.metrics import CLASSIFICATION

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Classification(Task):
    """Cross-entropy of a module on a data set that is resident on the device.

    Training images stay uint8 on the device and are scaled batch by batch; test images are scaled once when that takes
    less than ``resident_bytes``.
    """

    resident_bytes = 1 << 30
    metrics = CLASSIFICATION

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

    def evaluate(self, w: Tensor, batch_size: int = 500) -> dict[str, float]:
        """Return accuracy and mean loss of ``w`` on the test set."""
        correct, loss = self.score(w, batch_size)
        return self.means(correct.item(), loss.item())

    def means(self, correct: float, loss: float) -> dict[str, float]:
        """Return the metrics of a model that gets ``correct`` test samples right, with this sum of their losses."""
        return {"accuracy": correct / len(self.y_test), "loss": loss / len(self.y_test)}

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
