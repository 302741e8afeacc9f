"""What a network learns from samples that are resident on the device; :mod:`feddpc.tasks.kinds` has the kinds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from feddpc.data import Dataset
from feddpc.data.array_checks import IGNORED
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.kernels.launch import usable
from feddpc.models.flat import Flat
from feddpc.models.norm_fusion import fused
from feddpc.models.traits import Traits, norm_mask
from feddpc.tasks.augmentation import Transform, crop_and_flip
from feddpc.tasks.base import LARGE, Batch, BatchIndices, Task, WorkCounter
from feddpc.tasks.host_samples import HostSamples, Ints, Read, sample_tensor
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import Measure, Totals, choose_measures, listed_metrics
from feddpc.tasks.metrics import LOSS
from feddpc.tasks.trial import try_out

#: Makes totals of a model, some test samples and their targets.
TestTotals = Callable[[Tensor, Tensor, Tensor], Tensor]
#: One value per sample, or per sample and token, of outputs and targets.
Loss = Callable[[Tensor, Tensor], Tensor]
#: The name of the mask of all normalization layers, which no layer has.
NORMS = "/norms"


class NetworkTask(Task):
    """A module, a loss per sample, and a data set that is resident on the device. Subclasses say what is learned.

    Training images stay uint8 on the device and are scaled batch by batch, or stay in host memory (``on_host``), where
    those of each cohort are taken from; test images are scaled once when that takes less than ``resident_bytes``.

    A task of your own overrides :meth:`sample_losses`, and lists what it measures in ``measured``.
    """

    resident_bytes = 1 << 30
    width: int  #: outputs per sample, or per token
    first_statistics: Tensor  #: the statistics of the network before round 1
    name: ClassVar[str] = ""
    target: ClassVar[str] = ""  #: which targets of a data set it learns
    usual_loss: ClassVar[str] = ""  #: name of the loss, unless another is asked for
    measured: ClassVar[tuple[str, ...]] = ()  #: names of the metrics, unless others are asked for; the first is primary

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
        loss: Loss | None = None,
        transform: Transform | None = None,
        metrics: Sequence[Any] = (),
        on_host: bool = False,
        capacity: int = 0,
    ) -> None:
        super().__init__()
        self.transform = transform
        self.sample_loss: Loss | None = loss or (LOSSES.get(self.usual_loss) if self.usual_loss else None)
        self.measures: tuple[Measure, ...] = choose_measures(metrics or self.measured, self.target)
        self.metrics = listed_metrics(self.measures)
        self.module = module.to(device=device, dtype=dtype)
        self.flat = Flat(self.module)
        self.traits = Traits((), False, 1)
        self.d = self.flat.d
        self._masks: dict[str, Tensor] = {}
        self.scaler = scaler.to(device, dtype)
        self.shift, self.half = shift, half
        self.classes = data.classes
        self._load(data, torch.device(device), on_host, capacity)
        x_test, self.y_test = self.tensors(data, data.x_test, data.y_test, device)
        floats = x_test.numel() * torch.empty((), dtype=dtype).element_size()
        self.test_scaled = floats <= self.resident_bytes
        # Convolutions on a CPU are faster on images whose channels lie together.
        self.image_layout = torch.channels_last if self.x.ndim == 4 and self.x.device.type == "cpu" else None
        if data.is_image and self.image_layout is not None:
            self.scaler = self.scaler.for_images(*self.x.shape[2:])
        self.x_test = self._laid_out(self.scaler(x_test)) if self.test_scaled else x_test
        self.module.train()
        self.stochastic = try_out(self, data.classes)

    def changed(self, *, module: nn.Module | None = None, data: Dataset | None = None) -> Self:
        """Return this task with another network or other training samples; what stays is shared, tests included."""
        twin = copy.copy(self)
        twin.work = WorkCounter()
        if data is not None:
            twin._load(data, self.device, self.host is not None)
        if module is not None:
            twin.module = module.to(device=self.x.device, dtype=self.scaler.dtype).train()
            twin.flat, twin._masks = Flat(twin.module), {}
            twin.d = twin.flat.d
            twin.stochastic = try_out(twin, int(self.classes))
        return twin

    def _load(self, data: Dataset, device: torch.device, on_host: bool, capacity: int = 0) -> None:
        """Bring the training samples to the device; ``on_host``: only two of them, and later those of each cohort."""
        if not on_host:
            self.host = None
            self.x, self.y = self.tensors(data, data.x_train, data.y_train, device)
        else:
            self.host = HostSamples(self._reader(data), device, capacity)
            self.x, self.y = (part.to(device) for part in self._reader(data)(np.arange(min(2, len(data.y_train)))))
        self.device, self.data = self.x.device, data

    def _reader(self, data: Dataset) -> Read:
        return lambda ids: self.tensors(data, data.x_train[ids], data.y_train[ids], "cpu")

    def samples(self, ids: Ints) -> Batch:
        """Return training samples by their numbers, wherever they are kept, as the network wants them."""
        if self.host is None:
            return super().samples(ids)
        x, y = self._reader(self.data)(ids)
        return Batch(self.inputs(x.to(self.device)), y.to(self.device))

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and inputs."""
        return self.scaler.dtype

    def reduced(self, precision: str, tests: int = 8) -> Self:
        """Return a copy for trials: a network of its own in ``precision``, and a few test samples."""
        dtype = torch.float64 if precision == "float64" else torch.float32
        twin = copy.copy(self)
        twin.work, twin.traces, twin._masks = WorkCounter(), {}, {}
        twin.module = copy.deepcopy(self.module).to(dtype)
        twin.flat = Flat(twin.module, self.flat.statistics)
        twin.first_statistics = self.first_statistics.to(dtype)
        twin.scaler = self.scaler.to(self.device, dtype)
        twin.half = precision == "bf16"
        if self.host is not None:
            twin.host = HostSamples(twin._reader(self.data), self.device)
        twin.x_test, twin.y_test = self.x_test[:tests], self.y_test[:tests]
        if twin.x_test.is_floating_point():
            twin.x_test = twin.x_test.to(dtype)
        if self.y.is_floating_point():
            twin.y, twin.y_test = self.y.to(dtype), twin.y_test.to(dtype)
        return twin

    def twin(self) -> Self:
        """Return this task with a network of its own, into which a call swaps its parameters; samples are shared."""
        twin = super().twin()
        twin.module = copy.deepcopy(self.module)
        twin.flat = Flat(twin.module, self.flat.statistics)
        return twin

    def check_outputs(self, output: Tensor, classes: int) -> None:
        """Raise unless the outputs for one sample fit the targets."""

    @property
    def loss_name(self) -> str:
        """What messages call the loss: the name of the function or module, or that of a task with its own."""
        if self.sample_loss is None or type(self).sample_losses is not NetworkTask.sample_losses:
            return type(self).__name__
        loss = self.sample_loss.func if isinstance(self.sample_loss, functools.partial) else self.sample_loss
        return str(getattr(loss, "__name__", type(loss).__name__))

    def initial(self) -> Tensor:
        """Return the module's parameters as the first global model; those of a large module become parts of it."""
        w = self.flat.vector()
        if w.numel() >= LARGE:
            self.flat.share(w)
        return w

    def fetch(self, rows: BatchIndices) -> Batch:
        """Gather, augment and scale the samples of ``rows`` on the device."""
        held: NetworkTask | HostSamples = self if self.host is None else self.host
        x = self._taken(held.x, rows.samples)
        if rows.draws is not None and self.transform is None:
            x = crop_and_flip(x, rows.draws, self.shift)
        x = self.inputs(x)
        if rows.draws is not None and self.transform is not None:
            x = self.transform(x, rows.draws)
        mask = None if rows.mask is None else rows.mask.to(self.scaler.dtype)
        return Batch(x, held.y[rows.samples], mask)

    def part(self, y: Tensor, name: str | Callable[..., Any], *args: Any) -> Any:
        """Call a method of the network with parameters ``y``."""
        self.work.add(passes=1)
        with self._rounded():
            output = self.flat.part(y, name, *args)
        return tree_map(lambda t: t.to(y.dtype), output) if self.half else output

    def mask(self, prefix: str) -> Tensor:
        """Return 1 at the parameters of one part of the network."""
        if prefix not in self._masks:
            self._masks[prefix] = self.flat.mask(prefix).to(self.x.device, self.scaler.dtype)
        return self._masks[prefix]

    def norm_mask(self, y: Tensor) -> Tensor:
        """Return 1 at the scales and shifts of normalization layers."""
        if NORMS not in self._masks:
            marked, sizes = norm_mask(self.module), zip(self.flat.names, self.flat.sizes, strict=True)
            mask = torch.cat([torch.full((n,), float(marked[name])) for name, n in sizes])
            self._masks[NORMS] = mask.to(self.x.device, self.scaler.dtype)
        return self._masks[NORMS]

    def _taken(self, x: Tensor, samples: Tensor) -> Tensor:
        """Return some samples, in the layout in which all lie; whole images are copied faster than their channels."""
        if self.image_layout is torch.channels_last and x.is_contiguous(memory_format=torch.channels_last):
            return x.movedim(1, 3).index_select(0, samples).movedim(3, 1)
        return x[samples]

    def inputs(self, x: Tensor) -> Tensor:
        """Scale samples ``[n, channels, height, width]``."""
        return self._laid_out(self.scaler(x))

    def _laid_out(self, x: Tensor) -> Tensor:
        return x if self.image_layout is None else x.contiguous(memory_format=self.image_layout)

    def transformable(self, *, stacked: bool = True, together: bool = False) -> Self:
        """Return this task for function transforms; ``vmap`` stacks clients and has no layout of channels."""
        twin = super().transformable()
        if self.x.ndim == 4:
            plain = torch.contiguous_format if self.device.type == "cpu" else None
            twin.image_layout = plain if stacked else torch.channels_last
        if usable(self.device):
            first = torch.arange(2, device=self.device).clamp(max=len(self.x) - 1)
            twin.module = fused(self.module, twin.inputs(self.x[first]))
        twin.flat = self.flat.of_copy(twin.module)
        twin.flat.together = together and not stacked
        return twin

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per sample, or per sample and token; to be overridden, while :meth:`losses` is called."""
        if self.sample_loss is None:
            raise BadInputError(f"{type(self).__name__} has no loss: define sample_losses, or give loss=")
        return self.sample_loss(outputs, targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per sample, or per sample and token, of outputs that are brought to the shape of targets."""
        return self.sample_losses(self.aligned(outputs, targets), targets)

    def aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return outputs ``[n, 1]`` as ``[n]`` where targets are ``[n]`` numbers."""
        one = targets.is_floating_point() and outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1
        return outputs.squeeze(-1) if one else outputs

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of the samples that are no padding."""
        self.work.add(passes=1)
        return batch.mean(self.losses(self.outputs(y, batch.x), batch.y))

    def outputs(self, y: Tensor, x: Tensor) -> Tensor:
        """Return what the network with parameters ``y`` makes of inputs ``x``."""
        with self._rounded():
            outputs: Tensor = self.flat(y, x)
        return outputs.to(y.dtype)

    def _rounded(self) -> AbstractContextManager[object]:
        """Let the network, and nothing else, compute in bfloat16, if that is the experiment's precision."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    # Evaluation: sums over the test set, from which every metric is made.

    def evaluate(self, w: Tensor, batch_size: int | None = None) -> dict[str, float]:
        """Return the metrics of ``w`` on the test set by name."""
        whole = [measure for measure in self.measures if measure.whole is not None]
        if not whole:
            return self.means(self.score(w, batch_size).tolist())
        seen: list[Tensor] = []
        totals = self.score(w, batch_size, lambda w, x, y: self._test_totals(w, x, y, seen)).tolist()
        outputs = self.aligned(torch.cat(seen), self.y_test)
        return self.means(totals) | {m.metric.name: m.compute(outputs, self.y_test) for m in whole}

    def metrics_of(self, outputs: Tensor, targets: Tensor, names: Collection[str]) -> dict[str, float]:
        """Return metrics of some outputs and targets; of those that need them all at once, only ``names``."""
        aligned, needed = self.aligned(outputs, targets), [m for m in self.measures if m.metric.name in names]
        whole = {m.metric.name: m.compute(aligned, targets) for m in needed if m.whole is not None}
        return self.means(self._totals(outputs, targets).tolist(), targets) | whole

    @property
    def sums_suffice(self) -> bool:
        """Whether sums over the test set give all metrics, which a captured evaluation needs."""
        return all(measure.whole is None for measure in self.measures)

    @property
    def totals(self) -> int:
        """How many sums an evaluation makes."""
        return 1 + sum(measure.size(self.width) for measure in self.measures)

    def means(self, totals: list[float], targets: Tensor | None = None) -> dict[str, float]:
        """Return the metrics that follow from the totals of all ``targets``, by default those of the test set."""
        y = self.y_test if targets is None else targets
        counted = int((y != IGNORED).sum()) if self.target == "tokens" else len(y)
        loss = totals[0] / (counted if self.loss_per_token else len(y))
        rest, metrics = totals[1:], {}
        for measure in self.measures:
            size = measure.size(self.width)
            sums, rest = rest[:size], rest[size:]
            if measure.whole is None:
                metrics[measure.metric.name] = measure.value(Totals(counted, loss, sums))
        return metrics | {LOSS.name: loss}

    def loss_total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of some test samples."""
        values = self.losses(outputs, targets)
        return (values * (targets != IGNORED)).sum() if values.ndim > 1 else values.sum()

    def test_totals(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the totals of some test samples: the sum of their losses, then those of the metrics, in float64."""
        return self._test_totals(w, x, y, [])

    def _test_totals(self, w: Tensor, x: Tensor, y: Tensor, seen: list[Tensor]) -> Tensor:
        outputs = self.outputs(w, self._laid_out(x if self.test_scaled else self.scaler(x)))
        seen.append(outputs)
        return self._totals(outputs, y)

    def _totals(self, outputs: Tensor, y: Tensor) -> Tensor:
        sums = [self.loss_total(outputs, y)]
        sums += [m.totals(self.aligned(outputs, y), y) for m in self.measures if m.totals is not None]
        return torch.cat([part.double().reshape(-1) for part in sums])

    @torch.no_grad()
    def score(self, w: Tensor, batch_size: int | None = None, totals_of: TestTotals | None = None) -> Tensor:
        """Return the totals of the whole test set, on the device; ``totals_of`` may be ``test_totals``, compiled."""
        self.module.eval()
        totals_of = totals_of or self.test_totals
        total = torch.zeros((), dtype=torch.float64, device=w.device)
        for x, y in self.test_batches(batch_size):
            total = total + totals_of(w, x, y)
        self.module.train()
        return total

    def test_batches(self, batch_size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the test set in parts; on a CPU, sequences in parts whose activations fit into its caches."""
        if batch_size is None:
            positions = self.y_test.shape[1] if self.target == "tokens" and self.device.type == "cpu" else 4
            batch_size = max(1, 2000 // positions)
        parts = (torch.split(part, batch_size) for part in (self.x_test, self.y_test))
        return list(zip(*parts, strict=True))

    def tensors(self, data: Dataset, x: np.ndarray, y: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return samples and targets on ``device``."""
        targets = torch.from_numpy(np.array(y))
        targets = targets.to(self.scaler.dtype) if targets.is_floating_point() else targets.to(torch.int64)
        return sample_tensor(data, x, together=torch.device(device).type == "cpu").to(device), targets.to(device)
