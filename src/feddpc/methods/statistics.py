"""What a network measures at its clients, BatchNorm's statistics above all: averaged, or kept by the client.

Statistics are not trained, and no rule for updates fits them: a projected variance may be negative. So they travel
with the update, under a name of their own, and the server takes their plain mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods._algebra import exact_sum
from feddpc.methods.base import ClientContext, Method, State
from feddpc.models.flat import Flat
from feddpc.tasks.base import Batch, BatchIndices, Task

#: The name of a client's statistics among what it receives, remembers and sends.
STATISTICS = "/statistics"


class _Local(NamedTuple):
    """A local model and the statistics that go with it."""

    y: Tensor
    statistics: Tensor


def with_statistics(method: Method, first: Tensor) -> Method:
    """Return ``method`` for a network that measures statistics, for engines that run one client after the other.

    A client starts with the statistics that it kept, or else received, and sends those that it ends with; ``first``
    are those that stand in the network while it answers a probe.
    """
    if method.parts:
        raise BadInputError(
            f"{method.name} sends several models through parts of the network, whose statistics would mix: convert "
            "BatchNorm with feddpc.models.to_groupnorm, or choose another method"
        )
    kind: Any = type(method)  # for a type checker, the class of a frozen dataclass is not hashable
    local: Method = object.__new__(_class(kind))
    local.__dict__.update(method.__dict__, first_=first)
    return local


def mean_statistics(flat: Flat, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of the clients' statistics; of whole numbers, such as counts of batches, the largest."""
    mean = exact_sum(rows, weights.to(rows.device)).to(rows.dtype)
    largest = rows.amax(0)
    whole = {name: not b.is_floating_point() for name, b in flat.buffers(largest).items()}
    sizes = [b.numel() for b in flat.buffers(largest).values()]
    marks = [torch.full((n,), w, device=rows.device) for n, w in zip(sizes, whole.values(), strict=True)]
    return torch.where(torch.cat(marks), largest, mean)


class _WithStatistics(Method):
    """The client half with statistics: what is carried from step to step is the local model and its statistics."""

    plain_: ClassVar[type[Method]]
    first_: Tensor

    @property
    def _plain(self) -> Method:
        """The method itself, whose hooks may call each other."""
        plain: Method = object.__new__(self.plain_)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key != "first_"})
        return plain

    def probe(self, task: Task, w: Tensor, data: Iterable[BatchIndices]) -> State:
        """The method's own question, to a network with the statistics of the global model."""
        _flat(task).write_statistics(self.first_)
        return self._plain.probe(task, w, data)

    def start(self, ctx: ClientContext) -> Any:
        """The method's own start, and the statistics that the client kept or received."""
        held = ctx.state.get(STATISTICS)
        return _Local(self._plain.start(ctx), ctx.broadcast[STATISTICS] if held is None else held)

    def step(self, task: Task, y: Any, batch: Batch, ctx: ClientContext) -> Any:
        """The method's own step, which measures."""
        flat = _flat(task)
        flat.write_statistics(y.statistics)
        after, value = self._plain.step(task, y.y, batch, ctx)
        return _Local(after, flat.read_statistics()), value

    def finish(self, y: Any, ctx: ClientContext) -> tuple[State, State]:
        """The method's own end; the statistics are sent, and kept where that is asked for."""
        up, own = self._plain.finish(y.y, ctx)
        kept = {STATISTICS: y.statistics} if STATISTICS in ctx.state else {}
        return up | {STATISTICS: y.statistics}, own | kept


@functools.lru_cache(maxsize=64)
def _class(kind: type[Method]) -> type[Method]:
    return type(kind.__name__, (_WithStatistics, kind), {"__module__": kind.__module__, "plain_": kind})


def _flat(task: Task) -> Flat:
    flat: Flat = task.flat  # type: ignore[attr-defined]  # only networks measure statistics
    return flat
